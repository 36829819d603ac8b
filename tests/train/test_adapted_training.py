"""Training of adapters: the losses of all meshes are those of one device, and no product has the size of a frozen
matrix."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, program
from support.families import MODELS

from mesh_transformer.parallel.sharding import use
from mesh_transformer.sequences import Sequences
from mesh_transformer.train.batch import Batch
from mesh_transformer.train.step import TrainProgram, compile_step, stored

# no width is one of an activation: 8 sequences of 40 positions, 4 heads of 16
SIZES = {"layers": 4, "d_model": 64, "n_heads": 4, "n_vocab": 512, "seq": 40}
CASES = {
    "llama": {"family": "llama", **SIZES, "n_kv_heads": 2, "d_ff": 96},
    "gptj": {**SIZES, "pe_rotary_dims": 4},
    "mixtral": {"family": "mixtral", **SIZES, "n_kv_heads": 2, "d_ff": 96, "n_experts": 4, "experts_per_token": 2},
    "deepseek_v3": {**MODELS["deepseek_v3"], "layers": 5, "seq": 40},
    "gpt_neox": {"family": "gpt_neox", **SIZES},
}
ADAPTED = {**TINY, "lora": {"rank": 4, "alpha": 8}}
# float32 sums in another order: 2.4e-7 measured
RTOL = 1e-5
STEPS = 10
_RANDOM = np.random.default_rng(0)
TOKENS = _RANDOM.integers(0, 512, (STEPS, 2, 8, 41)).astype(np.int32)
TARGETS = 'lora.targets=["kv_b","o","shared/in","q_a"]'


def run_of(case: str, *changes: str, devices: int = 1, remat: str = "none") -> TrainProgram:
    return program({**ADAPTED, "model": CASES[case]}, *changes, devices=devices, remat=remat)


def losses(run: TrainProgram, documents: np.ndarray | None = None) -> np.ndarray:
    """Loss, norm of the gradient and norm of the trained parameters in each step."""
    state, rows = run.init(jax.random.key(0)), []
    for tokens in TOKENS:
        state, metrics = run.train_step(state, Sequences(tokens, documents))
        rows.append([float(metrics[f"train/{name}"]) for name in ("loss", "grad_norm", "param_norm")])
    return np.array(rows)


@functools.cache
def on_one_device(case: str, *changes: str) -> np.ndarray:
    return losses(run_of(case, *changes))


@pytest.mark.parametrize(
    ("case", "devices", "changes"),
    [
        pytest.param("llama", 4, ["mesh.fsdp=2", "mesh.tp=2"], marks=pytest.mark.nightly),
        ("llama", 4, ["mesh.fsdp=2", "mesh.tp=2", "mesh.shard_activations=true"]),
        pytest.param(
            "gptj", 2, ["mesh.tp=2", "mesh.shard_activations=true", "mesh.overlap_tp=true"], marks=pytest.mark.nightly
        ),
        ("llama", 4, ["mesh.pp=2", "mesh.tp=2"]),
        pytest.param(
            "llama", 2, ["mesh.pp=2", "mesh.schedule=interleaved", "mesh.rounds=2"], marks=pytest.mark.nightly
        ),
        pytest.param("llama", 4, ["mesh.cp=2", "mesh.fsdp=2"], marks=pytest.mark.nightly),
        ("mixtral", 4, ["mesh.ep=2", "mesh.tp=2"]),
        pytest.param("mixtral", 4, ["mesh.ep=2", "mesh.fsdp=2", "experts.exchange=gather"], marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", 4, ["mesh.ep=2", "mesh.fsdp=2"], marks=pytest.mark.nightly),
        pytest.param("deepseek_v3", 2, ["mesh.pp=2"], marks=pytest.mark.nightly),
        pytest.param("gpt_neox", 4, ["mesh.dp=2", "mesh.tp=2", "mesh.zero1=true"], marks=pytest.mark.nightly),
        pytest.param(
            "gpt_neox", 4, ["mesh.dp=2", "mesh.tp=2", "mesh.sum_gradients=per_step"], marks=pytest.mark.nightly
        ),
    ],
)
def test_meshes_equal_one_device(case: str, devices: int, changes: list[str]) -> None:
    remat = "full" if "mesh.pp=2" in changes else "none"
    np.testing.assert_allclose(losses(run_of(case, *changes, devices=devices, remat=remat)), on_one_device(case), RTOL)


@pytest.mark.nightly
@pytest.mark.parametrize("remat", ["full", "save_attn", "save_matmuls"])
def test_what_the_backward_pass_recomputes_changes_nothing(remat: str) -> None:
    np.testing.assert_allclose(losses(run_of("llama", remat=remat)), on_one_device("llama"), RTOL)


@pytest.mark.nightly
def test_packed_documents_on_a_mesh() -> None:
    documents = np.sort(_RANDOM.integers(1, 4, TOKENS[0].shape), axis=-1).astype(np.int32)
    one, mesh = run_of("llama"), run_of("llama", "mesh.fsdp=2", "mesh.tp=2", devices=4)
    np.testing.assert_allclose(losses(mesh, documents), losses(one, documents), RTOL)


@pytest.mark.nightly
def test_dropout_has_one_mask_on_all_meshes() -> None:
    rate = "lora.dropout=0.3"
    one = on_one_device("deepseek_v3", rate, TARGETS)
    for changes in (["mesh.fsdp=2", "mesh.tp=2"], ["mesh.tp=2", "mesh.fsdp=2", "mesh.shard_activations=true"]):
        np.testing.assert_allclose(losses(run_of("deepseek_v3", rate, TARGETS, *changes, devices=4)), one, RTOL)
    # the first update has a learning rate of 0, and b is 0 before it: the masks change the losses after it
    without = on_one_device("deepseek_v3", TARGETS)
    assert one[0, 0] == without[0, 0]
    assert np.abs(one[-1, 0] - without[-1, 0]) > 1e-4


def test_the_adapters_change_nothing_at_first_and_alone_later() -> None:
    run, whole = run_of("llama"), program({**TINY, "model": CASES["llama"]})
    state, base = run.init(jax.random.key(0)), whole.init(jax.random.key(0))
    # the base is the model without adapters
    jax.tree.map(np.testing.assert_array_equal, run.parameters(state)["embed"], base.params["embed"])
    frozen = jax.device_get(state.frozen)
    assert not [name for leaves in state.params["blocks"].values() for name in leaves if "lora" not in name]
    before = jax.device_get(state.params)
    for tokens in TOKENS:
        state, metrics = run.train_step(state, tokens)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), frozen)
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), jax.device_get(state.params), before)
    assert all(jax.tree.leaves(changed))
    _, first = run.train_step(run.init(jax.random.key(0)), TOKENS[0])
    _, expected = whole.train_step(base, TOKENS[0])
    assert float(first["train/loss"]) == pytest.approx(float(expected["train/loss"]), rel=1e-6)
    assert float(metrics["train/param_norm"]) == pytest.approx(
        float(np.sqrt(sum((np.asarray(x) ** 2).sum() for x in jax.tree.leaves(state.params)))), rel=1e-6
    )


def test_initial_adapters_are_those_of_peft() -> None:
    """Uniform within 1 / sqrt(inputs), and zeros; the same on each mesh."""
    one, mesh = (
        jax.device_get(run.init(jax.random.key(0)).params)
        for run in (run_of("llama"), run_of("llama", "mesh.fsdp=2", "mesh.tp=2", devices=4))
    )
    jax.tree.map(np.testing.assert_array_equal, one, mesh)
    a, b = one["blocks"]["ff/out"]["w_lora_a"], one["blocks"]["ff/out"]["w_lora_b"]
    assert a.shape == (4, 96, 4)
    assert b.shape == (4, 4, 64)
    bound = 1 / np.sqrt(96)
    assert 0.95 * bound < np.abs(a).max() <= bound
    assert np.std(a) == pytest.approx(bound / np.sqrt(3), rel=0.1)
    assert not b.any()


def test_gradients_equal_those_of_the_dense_matrices() -> None:
    """Through w + scale a b, which is made by the test."""
    run = run_of("deepseek_v3", "lora.alpha=12")
    state = run.init(jax.random.key(0))
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) * 0.1, jnp.float32), state.params)
    state = state._replace(params=params)
    whole = program({**TINY, "model": CASES["deepseek_v3"]})
    adapters = {adapter.path: adapter for form in run.model.decoder.forms for adapter in form.adapters}

    def dense(params):
        blocks = {module: dict(leaves) for module, leaves in state.frozen["blocks"].items()}
        for path, adapter in adapters.items():
            for stack, _ in whole.model.decoder.stacks[path]:
                module, _, name = stack.rpartition("/")
                prefix = stack.removesuffix(path)
                owner, _, owner_name = f"{prefix}{adapter.a_of}".rpartition("/")
                a = params["blocks"][owner][f"{owner_name}_lora_a"]
                b = params["blocks"][module][f"{name}_lora_b"]
                letters = {2: "lir,lro->lio", 3: "leir,lero->leio"}[b.ndim - 1]
                if path.endswith("kv_b/w"):
                    letters = "lir,lhro->lhio"
                blocks[module][name] = blocks[module][name] + 3.0 * jnp.einsum(letters, a, b)
        return {**state.frozen, "blocks": blocks}

    def loss_of(run, params, frozen):
        with use(run.partition):
            parts = run._parts(run._objective, run._dispatch)
            return run.schedule.loss(parts, run.transform(params, frozen), _microbatch())[0]

    ours = jax.grad(lambda params: loss_of(run, params, state.frozen))(params)
    theirs = jax.grad(lambda params: loss_of(whole, dense(params), {}))(params)

    def close(x, y):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max())

    jax.tree.map(close, ours, theirs)


def _microbatch():
    return Batch.of(Sequences(jnp.asarray(TOKENS[0, 0])))


@pytest.mark.parametrize(
    ("devices", "changes"),
    [
        pytest.param(1, [], id="one device"),
        pytest.param(4, ["mesh.fsdp=2", "mesh.tp=2"], id="fsdp x tp", marks=pytest.mark.nightly),
        pytest.param(2, ["mesh.pp=2"], id="pp"),
    ],
)
def test_no_product_has_the_size_of_a_frozen_matrix(devices: int, changes: list[str]) -> None:
    """Their gradients are not computed. The same program without adapters has such products."""
    remat = "full" if changes else "none"

    def products(raw: dict) -> set[tuple[int, ...]]:
        run = program({**raw, "model": CASES["llama"]}, *changes, devices=devices, remat=remat)
        text = compile_step(run, 2, 8).as_text()
        shapes = re.findall(r"= \w+\[([\d,]+)\]\S* dot\(", text)
        return {tuple(sorted(int(n) for n in shape.split(",") if n != "1")) for shape in shapes}

    parts = (1, 2) if "mesh.tp=2" in changes else (1,)
    sides = [(64, 64), (64, 32), (64, 96)]
    frozen = {tuple(sorted((a // i, b // j))) for a, b in sides for i in parts for j in parts}
    assert not products(ADAPTED) & frozen
    assert products(TINY) & frozen


def test_a_checkpoint_has_adapters_and_moments_alone() -> None:
    state = stored(run_of("llama").abstract_state)
    elements = sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(state.params))
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(state)) < 3.01 * elements
    assert state.frozen == {}


def test_what_is_frozen_is_in_the_compute_dtype() -> None:
    run = program({**ADAPTED, "model": CASES["deepseek_v3"]}, dtype="bfloat16")
    dtypes = {
        "/".join(key.key for key in path): leaf.dtype.name
        for path, leaf in jax.tree_util.tree_leaves_with_path(run.abstract_state.frozen)
    }
    assert {dtype for name, dtype in dtypes.items() if "router" not in name} == {"bfloat16"}
    assert {dtype for name, dtype in dtypes.items() if "router" in name} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.abstract_state.params)} == {"float32"}
