"""Each optimizer against optax's own, its state on a mesh and in files, and training with a frozen part."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.array_source import ArraySource
from support.builders import program
from support.classic_folders import RandomSource, model_config
from support.families import MODELS

from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.identity import check_optimizer
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import UpdateCounts
from mesh_transformer.errors import UserError
from mesh_transformer.optimizers import OPTIMIZERS
from mesh_transformer.train.optimizer import Optimizer, schedule_of

SMALL = {
    "model": {"layers": 2, "d_model": 32, "n_heads": 4, "n_vocab": 64, "vocab_multiple": 32, "seq": 12},
    "optimizer": {"lr": 1e-3, "warmup_steps": 0, "anneal_steps": 10},
    "data": {"batch_size": 4},
}
TOKENS = np.random.default_rng(0).integers(0, 64, (3, 1, 4, 13)).astype(np.int32)
MESH = ("mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.zero1=true")
FACTORED = "optimizer.min_dim_size_to_factor=8"
# the stacks of a model with unlike layers: all layers, the dense ones, the ones with experts
AXES = {
    "tables": {"w": ("vocab", "embed"), "b": ("vocab",), "scale": ()},
    "blocks": {"w": ("layers", "embed", "mlp"), "b": ("layers", "mlp"), "scale": ("layers",)},
    "dense": {"w": ("whole_layers", "mlp", "embed"), "b": ("whole_layers", "embed")},
    "experts": {
        "w": ("whole_layers", "experts", "embed", "mlp"),
        "b": ("whole_layers", "experts", "mlp"),
        "bias": ("whole_layers", "experts"),
        "square": ("whole_layers", "embed", "embed"),
        "thin": ("whole_layers", "embed", "kv_rank"),
    },
}
SHAPES = {
    "tables": {"w": (12, 8), "b": (12,), "scale": ()},
    "blocks": {"w": (3, 8, 16), "b": (3, 16), "scale": (3,)},
    "dense": {"w": (1, 16, 8), "b": (1, 8)},
    "experts": {"w": (2, 5, 8, 16), "b": (2, 5, 16), "bias": (2, 5), "square": (2, 8, 8), "thin": (2, 8, 3)},
}


def drawn(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    draw = lambda shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, SHAPES, is_leaf=lambda node: isinstance(node, tuple))


def unstacked(tree: dict[str, Any]) -> dict[str, Any]:
    """The tree with each layer as a tree of its own."""
    stacks = {name: arrays for name, arrays in tree.items() if name != "tables"}
    layers = {
        f"{stack}/{layer}": {name: x[layer] for name, x in arrays.items()}
        for stack, arrays in stacks.items()
        for layer in range(len(arrays["b"]))
    }
    return {**tree["tables"], **layers}


def theirs(name: str, config: Any) -> optax.GradientTransformation:
    rate = lambda count: schedule_of(config)(count)  # noqa: E731
    if name == "lion":

        def matrices(params: Any) -> Any:
            # an array has the biases of all experts
            return jax.tree.map_with_path(lambda path, p: p.ndim > 1 and path[-1].key != "b", params)

        return optax.lion(rate, config.b1, config.b2, weight_decay=config.weight_decay, mask=matrices)
    # optax's decay is not multiplied by the learning rate, ours is: compared without any
    return optax.adafactor(
        rate, min_dim_size_to_factor=config.min_dim_size_to_factor, multiply_by_parameter_scale=False
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [("lion", {"weight_decay": 0.3}), ("adafactor", {"weight_decay": 0, "min_dim_size_to_factor": 4})]
)  # fmt: skip
def test_updates_equal_those_of_optax_layer_by_layer(name: str, fields: dict[str, Any]) -> None:
    config = OPTIMIZERS[name](name=name, warmup_steps=2, lr=1e-2, **fields)
    ours, other = Optimizer(config, AXES), optax.chain(optax.clip_by_global_norm(1.0), theirs(name, config))
    params = drawn(0)
    state, expected_state = ours.init(params), other.init(unstacked(params))
    for seed in range(1, 4):
        gradient = drawn(seed)
        updates, state = jax.jit(ours.update)(gradient, state, params)
        expected, expected_state = jax.jit(other.update)(unstacked(gradient), expected_state, unstacked(params))
        # norms and means of float32 in another order
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), unstacked(updates), expected)
        params = optax.apply_updates(params, updates)
    assert int(state["count"]) == int(state["schedule"]) == 3


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_slot_has_the_names_of_its_dimensions(name: str) -> None:
    config = OPTIMIZERS[name](name=name, **({"min_dim_size_to_factor": 8} if name == "adafactor" else {}))
    optimizer, params = Optimizer(config, AXES), drawn(0)
    state, slots = optimizer.init(params), optimizer.slot_axes(params)
    assert state.keys() - slots.keys() == {"count", "schedule"}
    sizes = {"vocab": 12, "embed": 8, "mlp": 16, "layers": 3, "experts": 5, "kv_rank": 3, None: 1}
    for slot, trees in slots.items():
        for stack, arrays in trees.items():
            for name, axes in arrays.items():
                lengths = {**sizes, "whole_layers": SHAPES[stack]["b"][0]}
                assert state[slot][stack][name].shape == tuple(lengths[dimension] for dimension in axes), (stack, name)
    if name == "adafactor":
        assert slots["v_row"]["blocks"]["w"] == ("layers", "embed")
        assert slots["v_col"]["blocks"]["w"] == ("layers", "mlp")
        assert slots["v_row"]["tables"]["w"] == ("embed",)
        assert slots["v"]["blocks"] == {"w": ("layers", None), "b": ("layers", "mlp"), "scale": ("layers",)}
        assert slots["v_row"]["experts"]["w"] == ("whole_layers", "experts", "embed")


@pytest.mark.parametrize("overrides", [("optimizer.name=lion",), ("optimizer.name=adafactor", FACTORED)])
def test_state_on_a_mesh_and_in_files(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Sharded as on one device; saved there and gone on with here."""
    sharded, alone = program(SMALL, *MESH, *overrides, devices=8), program(SMALL, *overrides)
    state, expected = sharded.init(jax.random.key(0)), alone.init(jax.random.key(0))
    for slot in sharded.config.optimizer.slots:
        matrix = state.opt_state[slot]["blocks"]["ff/in"]["w"]
        # but for a placeholder, split over dp, fsdp and tp together; a factor has lost one of the two dimensions
        assert matrix.sharding.is_fully_replicated == (slot == "v")
    state, _ = sharded.train_step(state, TOKENS[0])
    expected, _ = alone.train_step(expected, TOKENS[0])
    # of the first gradient; after it Lion's signs of what is nearly zero differ
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max() + 1e-12),
        state.opt_state,
        jax.device_get(expected.opt_state),
    )
    store = CheckpointStore(str(tmp_path))
    store.save(1, state, {})
    store.close()
    found = CheckpointStore(str(tmp_path), read_only=True).restore(alone.abstract_state)
    assert found is not None
    kept, here = flatten(jax.device_get(state)), found.state
    assert {name.split("/")[1] for name in kept if name.startswith("opt_state/")} == state.opt_state.keys()
    for name, array in flatten(here).items():
        np.testing.assert_array_equal(array, kept[name], err_msg=name)
    for tokens in TOKENS[1:]:
        state, metrics = sharded.train_step(state, tokens)
        here, expected_metrics = alone.train_step(here, tokens)
        # of sums in another order: as test_meshes.py for one step, and the second begins from other signs
        np.testing.assert_allclose(metrics["train/loss"], expected_metrics["train/loss"], rtol=1e-4)


def test_a_frozen_part_keeps_its_values_and_has_no_slots() -> None:
    def without_embeddings(params: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {name: params[name] for name in ("blocks", "head")}, {"embed": params["embed"]}

    whole = program(SMALL)
    run = type(whole)(whole.placement, whole.config, split=without_embeddings)
    state = run.init(jax.random.key(0))
    before = jax.device_get(state)
    for tokens in TOKENS:
        state, metrics = run.train_step(state, tokens)
    assert state.opt_state["mu"].keys() == state.opt_state["nu"].keys() == state.params.keys() == {"blocks", "head"}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), before.frozen)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), jax.device_get(state.params), before.params)
    assert all(jax.tree.leaves(changed))
    assert not [name for name in flatten(whole.abstract_state) if name.startswith("frozen")]
    # the loss of the first step does not depend on what is trained
    _, expected = whole.train_step(whole.init(jax.random.key(0)), TOKENS[0])
    _, first = run.train_step(run.init(jax.random.key(0)), TOKENS[0])
    assert first["train/loss"] == expected["train/loss"] != metrics["train/loss"]


def test_layers_with_biases_of_routers_can_be_frozen() -> None:
    model = {**MODELS["deepseek_v3"], "seq": 12}
    whole = program({**SMALL, "model": model})
    run = type(whole)(
        whole.placement,
        whole.config,
        split=lambda params: ({"head": params["head"]}, {name: params[name] for name in ("embed", "blocks")}),
    )
    state, metrics = jax.eval_shape(run.train_step, run.abstract_state, TOKENS[0])
    assert state.params.keys() == {"head"}
    assert "experts/largest_load" in metrics


SLOTS = {"adam": ("mu", "nu"), "lion": ("mu",), "adafactor": ("v_row", "v_col", "v")}


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("held", SLOTS)
def test_state_of_another_optimizer_is_refused(held: str, noted: bool) -> None:
    """Told by the config that a checkpoint notes, else by the names of the slots."""
    arrays = {f"{kind}/head/logits/b": np.zeros(4, np.float32) for kind in ("params", *SLOTS[held])}
    source = ArraySource(arrays, UpdateCounts(3, 3, 3))
    if noted:
        source.extra = {"config": {"optimizer": {"name": held}}}
    for name, kind in OPTIMIZERS.items():
        if name == held:
            check_optimizer(source, kind(name=name))
            continue
        with pytest.raises(UserError) as refused:
            check_optimizer(source, kind(name=name))
        for part in (
            f"optimizer {held},",
            f"optimizer.name {name}:",
            f"set optimizer.name={held}",
            "--fresh-opt",
        ):
            assert part in str(refused.value)
    slim = ArraySource({"params/head/logits/b": arrays["params/head/logits/b"]}, UpdateCounts(3))
    with pytest.raises(UserError, match="no Lion moments"):
        check_optimizer(slim, OPTIMIZERS["lion"](name="lion"))


def test_lion_has_no_full_classic_form(tmp_path: Path) -> None:
    """From Adam's tensors without one of the moments; the parameters alone are written."""
    model = model_config()
    whole = RandomSource(model, full=True)
    names = [name for name in whole.tensors if not name.startswith("nu/")]
    source = ArraySource(
        {name: whole.read(name, (slice(None),) * len(whole.tensors[name].shape)) for name in names},
        UpdateCounts(3, 3, 3),
    )
    for full in (None, True):
        with pytest.raises(UserError, match=r"an optimizer other than Adam \(mu\).*slim_model.py"):
            write_classic(source, model, str(tmp_path / "full"), 1, full=full)
    assert not list(tmp_path.iterdir())
    write_classic(source, model, str(tmp_path / "slim"), 1, full=False)
