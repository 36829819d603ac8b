"""A family, a mechanism, an optimizer, a model of unlike layers and a format are one file and one line each.

The tests use five additions, whose files are in support/added:

- added_family: norms after the branches only, and what a branch adds is scaled;
- added_mechanism: attention whose mixed values are multiplied by a gate;
- added_optimizer: gradient descent with momentum;
- added_period: layers of two kinds in turn, one of them with the added mechanism and three parallel parts;
- added_format: a folder with arrays, as a format of checkpoints.

The files are copied into a temporary folder, and imported; the lines are entries of the tables. What trains, is stored
and is served is compared with a function of the parameters that is written here.
"""

import functools
import importlib
import json
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.array_source import ArraySource
from support.builders import program
from support.covering import covering
from support.engines import complete, engine_of

from mesh_transformer.accelerators import ACCELERATORS, Accelerator
from mesh_transformer.checkpoint import open as opening
from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.writer import config_json, write_hf
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.checkpoint.tensors import UpdateCounts
from mesh_transformer.config import Config, names, parse_config
from mesh_transformer.config.schema import GROUPS, VARIANTS
from mesh_transformer.config.variants import Variants
from mesh_transformer.errors import UserError
from mesh_transformer.estimate.closed_form import GIB, estimate
from mesh_transformer.estimate.rates import GPU_PRODUCT_SHARE
from mesh_transformer.families import FAMILIES
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.models.block import MODULES
from mesh_transformer.optimizers import OPTIMIZERS
from mesh_transformer.runtime.convert import to_hf
from mesh_transformer.spec.flops import flops_per_token
from mesh_transformer.train.step import TrainProgram

# the files of support/added say what each addition is
FILES = ("added_family", "added_mechanism", "added_optimizer", "added_period", "added_format")
SIZES = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "d_ff": 32, "n_vocab": 32, "vocab_multiple": 32, "seq": 8}
# the scale is not the default: an export has to hold it
MODELS: dict[str, dict[str, Any]] = {
    "added": {"layers": 2, "branch_scale": 0.25},
    "period": {"layers": 5, "tied_head": True},
}
# the first update has the peak
RATE = {"lr": 0.1, "end_lr": 0.1, "warmup_steps": 0, "total_steps": 4}
PLAIN_GRADIENT = {"weight_decay": 0.0, "clip_norm": 1e9, "z_loss": 0.0, "gradient_accumulation_steps": 2}
OPTIMIZER = {"name": "momentum", "friction": 0.9, **RATE, **PLAIN_GRADIENT}
MESHES = {"dp x tp": (4, ["mesh.dp=2", "mesh.tp=2"]), "pp": (2, ["mesh.pp=2"])}
# microbatches, sequences, positions
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 2, 4, 9)).astype(np.int32)
# and a memory that takes no time
ONE_FLOP_A_SECOND = Accelerator("one", "", peak_tflops=1e-12 / GPU_PRODUCT_SHARE, memory_gb_s=math.inf, usable_gib=1)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def _added(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The files, and one line for each."""
    folder = tmp_path_factory.mktemp("added")
    for name in FILES:
        shutil.copy(Path(__file__).parent / "support" / "added" / f"{name}.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        family, mechanism, optimizer, period, format = (importlib.import_module(name) for name in FILES)
        patch.setitem(FAMILIES, "added", family.AddedConfig)
        patch.setitem(FAMILIES, "period", period.PeriodConfig)
        patch.setitem(MODULES, mechanism.GatedAttention, mechanism.GatedSelfAttention)
        patch.setitem(OPTIMIZERS, "momentum", optimizer.Config)
        patch.setattr(opening, "FORMATS", (*opening.FORMATS, format.ArraysFolder))
        # the validator and the names of fields were made from the tables as they were at import
        for group, made in VARIANTS.items():
            merged = Variants(made.tag, made.classes).merged
            patch.setitem(GROUPS, group, merged)
            patch.setitem(names.FIELDS, group, tuple(merged.model_fields))
        Config.model_rebuild(force=True)
        yield
    Config.model_rebuild(force=True)
    for name in FILES:
        del sys.modules[name]


@functools.cache
def run_of(family: str, mesh: str) -> TrainProgram:
    """The program of a model on a mesh: its step is compiled once for all tests."""
    devices, changes = MESHES[mesh]
    raw = {"model": {"family": family, **SIZES, **MODELS[family]}, "optimizer": OPTIMIZER, "data": {"batch_size": 4}}
    return program(raw, *changes, devices=devices, remat="full")


@functools.cache
def initial(family: str) -> Any:
    """The parameters of the first step, in numpy. Biases and norms are random too."""
    random = np.random.default_rng(1)
    params = jax.eval_shape(run_of(family, "dp x tp").model.init, jax.random.key(0))
    return jax.tree.map(lambda x: 0.3 * random.standard_normal(x.shape, np.float32) + (x.ndim < 3), params)


def begun(family: str, mesh: str) -> Any:
    """The state before the first step."""
    run = run_of(family, mesh)
    state = run.init(jax.random.key(0))
    return state._replace(params=jax.device_put(initial(family), run.state_shardings.params))


@functools.cache
def expected(family: str) -> tuple[list[float], Any]:
    """The losses of two steps, and the parameters after them, by the functions below and plain momentum."""
    params, losses = jax.tree.map(jnp.asarray, initial(family)), []
    trace = jax.tree.map(jnp.zeros_like, params)
    step = jax.jit(jax.value_and_grad(functools.partial(plain_loss, PLAIN[family])))
    for tokens in TOKENS:
        loss, gradient = step(params, jnp.asarray(tokens.reshape(-1, tokens.shape[-1])))
        trace = jax.tree.map(lambda g, t: g + 0.9 * t, gradient, trace)
        params = jax.tree.map(lambda p, t: p - 0.1 * t, params, trace)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, params)


def plain_loss(logits_of: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """The mean cross-entropy of (B, T + 1) tokens."""
    logits = jax.nn.log_softmax(logits_of(params, tokens[:, :-1]))
    return -jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1).mean()


def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
    """The norm of every layer."""
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale[None, None]


def attention(row: Any, x: jax.Array, *, base: float | None = 10000.0, window: int = 8) -> jax.Array:
    """Four heads of queries and two of keys and values, of four dims each, before the output's matrix."""
    b, t, _ = x.shape
    q, k, v = (jnp.reshape(x @ row(f"attention/{name}"), (b, t, -1, 4)) for name in "qkv")
    if base is not None:
        angle = np.arange(t)[:, None] * base ** (-np.arange(2) / 2)[None]
        cos, sin = (np.tile(f(angle), 2).astype(np.float32)[None, :, None] for f in (np.cos, np.sin))
        q, k = (y * cos + jnp.concatenate([-y[..., 2:], y[..., :2]], -1) * sin for y in (q, k))
    k, v = (jnp.repeat(y, 2, axis=2) for y in (k, v))
    distance = np.arange(t)[:, None] - np.arange(t)[None]
    seen = ((distance >= 0) & (distance < window))[None, None]
    weights = jax.nn.softmax(jnp.where(seen, jnp.einsum("bthk,bshk->bhts", q, k) / 2, -1e30))
    return jnp.einsum("bhts,bshk->bthk", weights, v).reshape(b, t, -1)


def gated_ff(row: Any, x: jax.Array) -> jax.Array:
    """A feed-forward with a gate."""
    return (jax.nn.silu(x @ row("ff/gate")) * (x @ row("ff/in"))) @ row("ff/out")


def added_logits(params: Any, tokens: jax.Array) -> jax.Array:
    """The family with norms after the branches."""
    x = params["embed"]["tokens"]["w"][tokens]
    for layer in range(2):

        def row(name: str, leaf: str = "w", layer: int = layer) -> jax.Array:
            return params["blocks"][name][leaf][layer]

        x += 0.25 * rms(attention(row, x) @ row("attention/o"), row("attention_post_norm", "scale"))
        x += 0.25 * rms(gated_ff(row, x), row("ff_post_norm", "scale"))
    return rms(x, params["head"]["norm"]["scale"]) @ params["head"]["logits"]["w"]


def period_logits(params: Any, tokens: jax.Array) -> jax.Array:
    """The model of unlike layers: group 0 is two times (plain, gated), group 1 is a plain layer."""
    table = params["embed"]["tokens"]["w"]
    x = table[tokens]
    # run, place in it, place among the layers of its kind
    for layer, (run, place, of_kind) in enumerate([(0, 0, 0), (0, 1, 0), (0, 2, 1), (0, 3, 1), (1, 0, 0)]):
        gated = layer in (1, 3)
        only = ("attention/gate", "wide", "wide_out") if gated else ("ff_norm",)

        def row(
            name: str, leaf: str = "w", run: int = run, i: int = place, j: int = of_kind, own: Any = only
        ) -> jax.Array:
            return params["blocks"][f"{run}/{name}"][leaf][j if name.startswith(own) else i]

        y = rms(x, row("norm", "scale"))
        if gated:
            z = rms(x - x.mean(-1, keepdims=True), row("wide_norm", "scale"))
            hidden = jax.nn.relu(z @ row("wide/in") + row("wide/in", "b")[None, None])
            mixed = attention(row, y) * jax.nn.sigmoid(y @ row("attention/gate"))
            wide = hidden @ row("wide/out") + row("wide_out", "b")[None, None]
            x += mixed @ row("attention/o") + gated_ff(row, y) + wide
        else:
            base, window = None if layer == 0 else 10000.0, 3 if layer == 4 else 8
            x += attention(row, y, base=base, window=window) @ row("attention/o")
            x += gated_ff(row, rms(x, row("ff_norm", "scale")))
    return rms(x, params["head"]["norm"]["scale"]) @ table.T


PLAIN = {"added": added_logits, "period": period_logits}


@pytest.mark.parametrize(("family", "mesh"), covering(MODELS, MESHES))
def test_two_steps_equal_a_plain_function(family: str, mesh: str) -> None:
    run, state, losses = run_of(family, mesh), begun(family, mesh), []
    for tokens in TOKENS:
        state, metrics = run.train_step(state, tokens)
        losses.append(float(metrics["train/loss"]))
    own_losses, own_params = expected(family)
    np.testing.assert_allclose(losses, own_losses, **CLOSE)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), jax.device_get(state.params), own_params)


@pytest.mark.parametrize(("saved_on", "resumed_on"), [("dp x tp", "pp"), ("pp", "dp x tp")])
@pytest.mark.parametrize("family", MODELS)
def test_a_run_resumes_on_another_mesh(family: str, saved_on: str, resumed_on: str, tmp_path: Path) -> None:
    state, _ = run_of(family, saved_on).train_step(begun(family, saved_on), TOKENS[0])
    store = CheckpointStore(str(tmp_path))
    store.save(1, state, {})
    run = run_of(family, resumed_on)
    found = store.restore(run.abstract_state)
    store.close()
    assert found is not None
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.state), jax.device_get(state))
    resumed, metrics = run.train_step(found.state, TOKENS[1])
    own_losses, own_params = expected(family)
    np.testing.assert_allclose(float(metrics["train/loss"]), own_losses[1], **CLOSE)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **CLOSE), jax.device_get(resumed.params), own_params)


@pytest.mark.parametrize("family", MODELS)
def test_an_engine_serves_the_most_likely_tokens(family: str) -> None:
    run = run_of(family, "dp x tp")
    params = jax.device_put(initial(family), run.state_shardings.params)
    prompts = [[3, 1, 4], [15]]
    greedy = SamplingParams(max_tokens=4, temperature=0)
    found = complete(engine_of(run, params, slots=2), [(prompt, greedy) for prompt in prompts])
    for prompt, completion in zip(prompts, found, strict=True):
        text = jnp.asarray([[*prompt, *completion.ids]])
        likely = PLAIN[family](jax.tree.map(jnp.asarray, initial(family)), text).argmax(-1)[0]
        assert len(completion.ids) == 4
        assert completion.ids == likely[len(prompt) - 1 : -1].tolist()


def test_the_family_is_exported_and_read_back(tmp_path: Path) -> None:
    model = run_of("added", "dp x tp").config.model
    stored = {f"params/{path}": value for path, value in flatten(initial("added")).items()}
    write_hf(ArraySource(stored, UpdateCounts(0)), model, str(tmp_path / "hf"))
    assert read_model(str(tmp_path / "hf")).architecture() == model.architecture()
    source = HFSource(str(tmp_path / "hf"), model)
    for name, value in stored.items():
        found = source.read(name, (slice(None),) * value.ndim)
        np.testing.assert_array_equal(found, value, err_msg=name)
    assert len(source.tensors) == len(stored)


def test_a_checkpoint_of_the_format_is_converted(tmp_path: Path) -> None:
    model = run_of("added", "dp x tp").config.model
    stored = {f"params/{path}": value for path, value in flatten(initial("added")).items()}
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.savez(folder / "arrays.npz", **stored)
    (folder / "model.json").write_text(json.dumps(model.model_dump(mode="json")))
    to_hf(None, [], str(folder), str(tmp_path / "hf"), dtype="fp32")
    source = HFSource(str(tmp_path / "hf"), model)
    assert source.tensors.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(source.read(name, (slice(None),) * value.ndim), value, err_msg=name)


def device_bytes(leaves: Any, shardings: Any) -> int:
    """The bytes of float32 arrays on one device."""
    each = jax.tree.map(lambda leaf, sharding: math.prod(sharding.shard_shape(leaf.shape)), leaves, shardings)
    return 4 * sum(jax.tree.leaves(each))


def test_a_family_without_a_model_type_is_not_exported() -> None:
    with pytest.raises(UserError, match="no model of model.family period"):
        config_json(run_of("period", "pp").config.model, np.dtype(np.float32))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("family", MODELS)
def test_the_closed_form_counts_it(family: str, mesh: str) -> None:
    run = run_of(family, mesh)
    virtual_stages = run.model.virtual_stages
    shapes = {path: leaf.shape for path, leaf in flatten(jax.eval_shape(run.model.init, jax.random.key(0))).items()}
    assert {path: array.shape for path, array in run.model.decoder.arrays(virtual_stages).items()} == shapes
    state, shardings = run.abstract_state, run.state_shardings
    memory = estimate(run.config, MESHES[mesh][0], ACCELERATORS["v4"]).memory
    assert memory["parameters"] * GIB == pytest.approx(device_bytes(state.params, shardings.params))
    slots, of_slots = state.opt_state["trace"], shardings.opt_state["trace"]
    assert memory["optimizer state"] * GIB == pytest.approx(device_bytes(slots, of_slots))


@pytest.mark.parametrize("family", MODELS)
def test_its_operations_are_counted(family: str) -> None:
    decoder, params = run_of(family, "dp x tp").model.decoder, initial(family)
    # a tied head multiplies too
    head = SIZES["d_model"] * SIZES["n_vocab"]
    matrices = sum(leaf["w"].size for leaf in params["blocks"].values() if "w" in leaf) + head
    # queries with keys, and the softmax with values: four heads of four dims each
    seen = {"added": [8, 8], "period": [8, 8, 8, 8, 3]}[family]
    assert flops_per_token(decoder, 8) == 6 * (matrices + sum(seen) * 4 * (4 + 4))
    config = parse_config(
        run_of(family, "dp x tp").config.model_dump(), ["compute.remat=none", "mesh.dp=1", "mesh.tp=1"]
    )
    time = estimate(config, 1, ONE_FLOP_A_SECOND).time
    assert time["products"] == pytest.approx(6 * TOKENS[0, ..., 1:].size * (matrices - head))
