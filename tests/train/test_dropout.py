"""Dropout: the same zeros on every mesh and after a resume, none in evaluation, and a mean that is the output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, float32_model, program
from support.covering import covering

from mesh_transformer.config import parse_config
from mesh_transformer.models.block import LayerNumbers, encoded_positions
from mesh_transformer.models.model import Inputs
from mesh_transformer.models.modules import Dropout, noise
from mesh_transformer.models.stack import Stream
from mesh_transformer.train.step import TrainProgram

STEPS, RATE = 10, 0.2
RAW = {**TINY, "model": {**TINY["model"], "layers": 4}}
TOKENS = np.random.default_rng(0).integers(0, 512, (STEPS, 2, 8, 41)).astype(np.int32)
MESHES = {
    "dp2_fsdp2_tp2": ["mesh.dp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "pp2_fsdp2_tp2": ["mesh.pp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "interleaved_pp2_tp2": ["mesh.pp=2", "mesh.tp=2", "mesh.fsdp=2", "mesh.schedule=interleaved"],
    "cp2_fsdp2_tp2": ["mesh.cp=2", "mesh.fsdp=2", "mesh.tp=2", "mesh.shard_activations=true"],
    "dp2_fsdp4_per_step": ["mesh.dp=2", "mesh.fsdp=4", "mesh.sum_gradients=per_step"],
}
METRICS = ("train/loss", "train/last_loss", "train/grad_norm", "train/param_norm")


def with_dropout(*overrides: str, devices: int = 1, remat: str = "none") -> TrainProgram:
    return program(RAW, f"optimizer.dropout={RATE}", *overrides, devices=devices, remat=remat)


@functools.cache
def one_device() -> TrainProgram:
    return with_dropout()


def trained(run: TrainProgram, state: Any, tokens: np.ndarray) -> tuple[Any, np.ndarray]:
    """The state after steps on these tokens, and their METRICS."""
    rows = []
    for batch in tokens:
        state, metrics = run.train_step(state, batch)
        rows.append([float(metrics[name]) for name in METRICS])
    return state, np.array(rows)


@functools.cache
def metrics_of_one_device() -> np.ndarray:
    run = one_device()
    return trained(run, run.init(jax.random.key(1)), TOKENS)[1]


@pytest.mark.parametrize("mesh", covering(MESHES, daily=(["pp2_fsdp2_tp2", "cp2_fsdp2_tp2"],)))
def test_a_mesh_has_the_zeros_of_one_device(mesh: str) -> None:
    run = with_dropout(*MESHES[mesh], devices=8, remat="full" if "pp" in mesh else "none")
    _, metrics = trained(run, run.init(jax.random.key(1)), TOKENS)
    # float32 sums in another order
    np.testing.assert_allclose(metrics, metrics_of_one_device(), rtol=1e-5)


def test_a_resumed_run_has_the_zeros_of_a_whole_one() -> None:
    run = one_device()
    whole = run.init(jax.random.key(1))
    whole, _ = trained(run, whole, TOKENS[:2])
    stored = jax.device_get(whole)
    whole, _ = trained(run, whole, TOKENS[2:4])
    resumed, _ = trained(run, jax.device_put(stored, run.state_shardings), TOKENS[2:4])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed.params), jax.device_get(whole.params))


def test_an_evaluation_has_no_dropout() -> None:
    run, without = one_device(), program(RAW)
    params = run.init(jax.random.key(1)).params
    ours, theirs = run.eval_step(params, TOKENS[0, 0]), without.eval_step(params, TOKENS[0, 0])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))


def test_zeros_differ_by_step_microbatch_sequence_position_layer_and_place() -> None:
    """Two arrays of independent zeros agree in 0.2^2 + 0.8^2 of their numbers."""
    ones = jnp.ones((2, 3, 64))
    steps = [noise(7, jnp.int32(step), (2, 2, 3)) for step in (0, 1)]
    rows = [steps[0][0], steps[0][1], steps[1][0]]
    dropped = [Dropout(RATE, own, layer)(ones, place) for own in rows for layer in (-1, 0, 1) for place in (0, 1)]
    masks = np.concatenate([np.asarray(one).reshape(-1, 64) == 0 for one in dropped])
    agree = (masks[:, None] == masks[None]).mean(-1)[np.triu_indices(len(masks), 1)]
    # 64 numbers have a standard deviation of 0.058; there are 5,778 pairs
    assert np.abs(agree - (RATE**2 + (1 - RATE) ** 2)).max() < 5 * 0.058
    assert abs(masks.mean() - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / masks.size)


@pytest.mark.nightly
def test_the_mean_over_seeds_is_the_output_without_dropout() -> None:
    """Of a layer with one branch, whose output is linear in what the branch adds."""
    model = float32_model(parse_config(RAW).model)
    params = model.init(jax.random.key(0))
    (kind,) = model.decoder.kinds
    block = jax.tree.map(lambda x: x[0], params["blocks"])
    x_BTD = jax.random.normal(jax.random.key(1), (1, 4, 64))
    positions = model.positions(4)
    stream = Stream(x_BTD, None, Inputs(encoded_positions(model.decoder, positions), positions))
    numbers = LayerNumbers(None, 0, 0)

    def output(seed: jax.Array) -> jax.Array:
        inputs = stream.fixed._replace(noise_BT2=noise(0, seed, (1, 4)))
        (y_BTD, _), _ = model.layer(kind, block, stream._replace(fixed=inputs), numbers, dropout_rate=RATE)
        return y_BTD - x_BTD

    count = 4000
    outputs = jax.jit(jax.vmap(output))(jnp.arange(count))
    (y_BTD, _), _ = model.layer(kind, block, stream, numbers)
    expected = y_BTD - x_BTD
    deviation = np.abs(expected) * np.sqrt(RATE / (1 - RATE) / count)
    assert (np.abs(outputs.mean(0) - expected) <= 5 * deviation + 1e-6).all()
    assert ((outputs == 0) | np.isclose(outputs, expected / (1 - RATE), rtol=1e-4, atol=1e-6)).all()
