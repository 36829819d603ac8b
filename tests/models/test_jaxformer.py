"""The family jaxformer against JAXformer's own numbers (tests/golden/README.md): logits, gradients and updates."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden.jaxformer import BLOCKS, MODEL, numbers, parameters
from support.builders import float32_model, program

from mesh_transformer.checkpoint.hf.config import parse_model
from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.models.model import Model
from mesh_transformer.train.step import TrainProgram, TrainState

# of float32 sums in another order
LOGITS, LOSSES = 1e-5, 1e-6
# its loss has the sum over layers, ours the mean
BALANCE = 0.01 * BLOCKS
TRAINING = {
    "model": MODEL,
    "optimizer": {
        "lr": 6e-3,
        "end_lr": 6e-4,
        "warmup_steps": 2,
        # of 20 steps, with the warm-up
        "anneal_steps": 18,
        "total_steps": 20,
        "weight_decay": 1e-4,
        "z_loss": 0.0,
    },
    "experts": {"balance_loss": BALANCE, "z_loss": 0.0},
    "data": {"batch_size": 8},
}
MESHES = {"pp2_fsdp2_tp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2"]}
# a change of 1e-5 of the logits of its routers changes no choice of an expert in these steps (support.ties)
SEED = 1


@functools.cache
def model() -> Model:
    return float32_model(parse_config({"model": MODEL}).model)


def tokens_and_targets(x: np.ndarray) -> np.ndarray:
    """The target of the last token is the first one."""
    return np.concatenate([x, x[..., :1]], axis=-1).astype(np.int32)


def assert_logits_equal(found: jax.Array, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(found)[..., : expected.shape[-1]], expected, rtol=0, atol=LOGITS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": 7}, "model.layers 7 is not divisible by model.block_layers 3"),
        ({"rotary_dims": 5}, "model.rotary_dims 5 must be even"),
        ({"rotary_dims": 1 << 15}, "model.n_heads 4 x model.rotary_dims 32768 is too large"),
        ({"experts_per_token": 5}, "model.experts_per_token 5 exceeds model.n_experts 4"),
    ],
)
def test_wrong_sizes_are_refused(changes: dict[str, int], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_config({"model": {**MODEL, **changes}})


def test_it_has_no_hugging_face_form() -> None:
    with pytest.raises(UserError, match="transformers has no model of model.family jaxformer. Use the native format"):
        parse_config({"model": MODEL}).model.to_hf()
    with pytest.raises(UserError, match="model_type is 'jaxformer': only gptj,"):
        parse_model({"model_type": "jaxformer"}, "config.json")


def test_logits() -> None:
    x, expected = (numbers()[name].reshape(8, 16, *rest) for name, *rest in (("x",), ("logits", 61)))
    found, _ = jax.jit(model().apply)(parameters("params"), x.astype(np.int32))
    assert_logits_equal(found, expected)


def test_logits_with_a_cache() -> None:
    x, expected = (numbers()[name].reshape(8, 16, *rest) for name, *rest in (("x",), ("logits", 61)))
    cache = model().new_cache(8, 16)
    # latents with rotated keys, and latents alone
    assert [group[0][0].shape for group in cache.groups] == [(4, 8, 1, 16, 12), (2, 8, 1, 16, 8)]

    @jax.jit
    def step(params: Any, tokens: jax.Array, cache: Any, start: jax.Array) -> Any:
        logits, view = model().apply(params, tokens, cache.view(None, 16), start)
        return logits, view.cache

    start = 0
    for size in (9, *[1] * 7):
        now = slice(start, start + size)
        at = jnp.full(8, start, jnp.int32)
        found, cache = step(parameters("params"), x[:, now].astype(np.int32), cache, at)
        assert_logits_equal(found, expected[:, now])
        start += size


def test_gradients_and_updates() -> None:
    run = program(TRAINING)
    state = run.init(jax.random.key(0))._replace(params=jax.device_put(parameters("params")))
    for step, (loss, cross, balance) in enumerate(numbers()["updates/loss"]):
        state, metrics = run.train_step(state, tokens_and_targets(numbers()["updates/x"][step])[None])
        own = metrics["train/loss"], metrics["experts/balance_loss"]
        np.testing.assert_allclose(own, (cross, balance / BLOCKS), rtol=LOSSES)
        np.testing.assert_allclose(own[0] + BALANCE * own[1], loss, rtol=LOSSES)
        if step == 0:
            # Adam's first moment is a tenth of the gradient, which is clipped to the norm 1
            gradient = jax.tree.map(lambda mu, norm=metrics["train/grad_norm"]: 10 * mu * norm, state.opt_state["mu"])
            expected = parameters("gradient")
            assert jax.tree.structure(gradient) == jax.tree.structure(expected)
            jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6), gradient, expected)


def with_dropout(*overrides: str, devices: int = 1) -> TrainProgram:
    changes = ["optimizer.dropout=0.2", "optimizer.gradient_accumulation_steps=2"]
    return program(TRAINING, *changes, *overrides, devices=devices)


def losses_of(run: TrainProgram, state: TrainState, tokens: np.ndarray) -> tuple[TrainState, list[float]]:
    losses = []
    for batch in tokens:
        state, metrics = run.train_step(state, batch)
        losses.append(float(metrics["train/loss"]))
    return state, losses


# a mesh has its losses in tests/parallel/test_experts_meshes.py; this one compiles for a minute
@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_six_steps_on_a_mesh_equal_one_device_and_resume(mesh: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, MODEL["n_vocab"], (6, 2, 8, MODEL["seq"] + 1)).astype(np.int32)
    one, run = with_dropout(), with_dropout(*MESHES[mesh], devices=8)
    _, expected = losses_of(one, one.init(jax.random.key(SEED)), tokens)
    half, begun = losses_of(run, run.init(jax.random.key(SEED)), tokens[:3])
    store = CheckpointStore(str(tmp_path))
    store.save(3, half, {})
    whole, rest = losses_of(run, half, tokens[3:])
    # float32 sums in another order
    np.testing.assert_allclose([*begun, *rest], expected, rtol=LOGITS)
    found = store.restore(run.abstract_state)
    store.close()
    assert found is not None
    resumed, again = losses_of(run, found.state, tokens[3:])
    assert again == rest
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(whole))
