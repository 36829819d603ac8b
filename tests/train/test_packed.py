"""Rows of several documents, and losses of some tokens: the documents alone, in float64, are the oracle."""

import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
from support.builders import float32_model
from support.covering import covering
from support.packed import LENGTH, MICROBATCHES, ROWS, alone, packed, targets_of_documents, token_losses
from support.parity import SMALL, small_program

from mesh_transformer.errors import UserError
from mesh_transformer.ops.experts import route, statistics
from mesh_transformer.spec import RouterSpec
from mesh_transformer.train.batch import Batch, positions_in_documents
from mesh_transformer.train.step import TrainProgram

# float32 sums in another order, in nats and relative to the largest gradient; measured: 2e-6
CLOSE = 1e-5
MESHES = {
    "one": [],
    "cp2_ring": ["mesh.cp=2", "mesh.context_mode=ring"],
    "cp4_zigzag": ["mesh.cp=4", "mesh.context_mode=zigzag"],
    "cp2_gather": ["mesh.cp=2", "mesh.context_mode=gather"],
    "cp2_ulysses": ["mesh.cp=2", "mesh.context_mode=ulysses"],
    "dp4": ["mesh.dp=4"],
    "dp4_per_step": ["mesh.dp=4", "mesh.sum_gradients=per_step"],
    "tp2_fsdp2": ["mesh.tp=2", "mesh.fsdp=2"],
    "pp2": ["mesh.pp=2"],
    "pp2_interleaved_dp2": ["mesh.pp=2", "mesh.dp=2", "mesh.schedule=interleaved"],
    "dp2_pp2_per_step": ["mesh.dp=2", "mesh.pp=2", "mesh.sum_gradients=per_step"],
    "pp2_cp2_tp2_zigzag": ["mesh.pp=2", "mesh.cp=2", "mesh.tp=2", "mesh.context_mode=zigzag"],
}
DAILY = ["cp2_ring", "cp4_zigzag", "cp2_ulysses", "dp4_per_step", "pp2_cp2_tp2_zigzag"]
# layers before the group of layers that the stages of a pipeline share out
LEADING = {"deepseek_v3": 1}
SOURCES = 3
GIVEN = packed(SOURCES)
# a model that reads positions, and not their differences alone
LEARNED = "gptj_learned"
COUNTED = targets_of_documents(GIVEN.documents) & GIVEN.learned[..., 1:]


def _program(model: str, mesh: str = "one", layers: int | None = None) -> TrainProgram:
    stages = "pp2" in mesh
    sizes = {**SMALL[model], "layers": layers or (4 + LEADING.get(model, 0) if stages else 2)}
    # the gradient of the loss alone, as it is
    overrides = ["optimizer.z_loss=0", "optimizer.clip_norm=1000", *MESHES[mesh]]
    devices = math.prod(int(number) for number in re.findall(r"=(\d)", " ".join(MESHES[mesh])))
    run = small_program(sizes, *overrides, devices=devices, remat="full" if stages else "none")
    return TrainProgram(run.placement, run.config, sources=SOURCES)


@functools.cache
def _alone(model: str, layers: int) -> tuple[Any, np.ndarray, Any]:
    """The parameters, and the results of `alone` with the mean over the counted targets."""
    run = small_program({**SMALL[model], "layers": layers})
    params = jax.device_get(run.init(jax.random.key(1)).params)
    weights = COUNTED / COUNTED.sum()
    return params, *alone(float32_model(run.config.model), params, GIVEN, weights)


@pytest.mark.parametrize(
    ("model", "mesh"),
    covering(
        ["gptj", "gptj_learned", "gpt2", "gemma2", "bloom", "mixtral", "deepseek_v3"],
        MESHES,
        daily=(["gptj_learned", "gemma2", "bloom", "deepseek_v3"], DAILY),
    ),
)
def test_a_document_has_the_loss_that_it_has_alone(model: str, mesh: str) -> None:
    run = _program(model, mesh)
    params, expected, _ = _alone(model, run.config.model.layers)
    real = targets_of_documents(GIVEN.documents)
    for number in range(MICROBATCHES):
        found = token_losses(run, params, GIVEN.map(lambda array, at=number: array[at]))
        np.testing.assert_allclose(found[real[number]], expected[number][real[number]], rtol=0, atol=CLOSE)


@pytest.mark.parametrize(("model", "mesh"), covering(["gptj", "gemma2"], MESHES, daily=(["gemma2", "gptj"], DAILY[1:])))
def test_a_step_has_the_mean_over_all_learned_targets(model: str, mesh: str) -> None:
    """Not the mean of the microbatches' means. Gradient, last loss and sums of the sources too."""
    run = _program(model, mesh)
    params, nll, expected = _alone(model, run.config.model.layers)
    state = run.init(jax.random.key(1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    state, metrics = jax.device_get(run.train_step(state, GIVEN))
    loss = nll[COUNTED].mean()
    of_means = np.mean([losses[counted].mean() for losses, counted in zip(nll, COUNTED, strict=True)])
    assert abs(of_means - loss) > 100 * CLOSE
    np.testing.assert_allclose(metrics["train/loss"], loss, rtol=0, atol=CLOSE)
    last = [losses[counted][-1] for losses, counted in zip(_rows(nll), _rows(COUNTED), strict=True) if counted.any()]
    np.testing.assert_allclose(metrics["train/last_loss"], np.mean(last), rtol=0, atol=CLOSE)
    sources = np.repeat(GIVEN.sources[..., None], LENGTH, axis=-1)
    for source in range(SOURCES):
        own = COUNTED & (sources == source)
        np.testing.assert_array_equal(metrics["source_tokens"][source], own.sum())
        np.testing.assert_allclose(metrics["source_nll"][source], nll[own].sum(), rtol=CLOSE)
    # the first moment after one step, of which the gradient is a known multiple
    largest = max(np.abs(one).max() for one in jax.tree.leaves(expected))
    share = 1 - run.config.optimizer.b1
    jax.tree.map(
        lambda ours, one: np.testing.assert_allclose(ours / share, one, rtol=0, atol=CLOSE * largest),
        state.opt_state["mu"],
        expected,
    )


def _rows(array: np.ndarray) -> np.ndarray:
    return array.reshape(MICROBATCHES * ROWS, LENGTH)


def test_another_document_changes_no_loss_by_a_bit() -> None:
    run = _program(LEARNED)
    params, _, _ = _alone(LEARNED, 2)
    given = GIVEN.map(lambda array: array[0])
    changed = given.documents == 2
    others = given._replace(tokens=np.where(changed, (given.tokens + 7) % 500, given.tokens))
    before, after = (token_losses(run, params, one) for one in (given, others))
    real = targets_of_documents(given.documents)
    np.testing.assert_array_equal(before[real & ~changed[:, 1:]], after[real & ~changed[:, 1:]])
    # most targets of a changed document have another loss
    assert (before != after)[real & changed[:, 1:]].mean() > 0.9


def test_a_microbatch_or_a_step_may_learn_nothing() -> None:
    run = _program(LEARNED)
    params, nll, _ = _alone(LEARNED, 2)
    learned = GIVEN.learned.copy()
    learned[0] = False
    _, half = run.train_step(run.init(jax.random.key(1)), GIVEN._replace(learned=learned))
    np.testing.assert_allclose(half["train/loss"], nll[1][COUNTED[1]].mean(), rtol=0, atol=CLOSE)
    state, nothing = run.train_step(run.init(jax.random.key(1)), GIVEN._replace(learned=learned & False))
    assert all(np.isfinite(value).all() for value in jax.device_get(nothing).values())
    assert (nothing["train/loss"], nothing["train/last_loss"], nothing["train/grad_norm"]) == (0, 0, 0)
    # Adam divides its first moment, 0, by itself and a small number
    for moment in jax.tree.leaves(state.opt_state["mu"]):
        np.testing.assert_array_equal(moment, np.zeros(moment.shape))


def test_an_evaluation_counts_the_learned_targets() -> None:
    run = _program(LEARNED)
    params, nll, _ = _alone(LEARNED, 2)
    given = GIVEN.map(lambda array: array[1])
    found = jax.device_get(run.eval_step(params, given))
    assert found["tokens"] == COUNTED[1].sum()
    np.testing.assert_allclose(found["loss"], nll[1][COUNTED[1]].mean(), rtol=0, atol=CLOSE)
    last = [losses[counted][-1] for losses, counted in zip(nll[1], COUNTED[1], strict=True) if counted.any()]
    np.testing.assert_allclose(found["last_loss"], np.mean(last), rtol=0, atol=CLOSE)
    assert 0 <= found["accuracy"] <= 1
    assert jax.device_get(run.eval_step(params, given.tokens))["tokens"] == ROWS * LENGTH


def test_the_noise_scale_is_off_where_targets_have_weights() -> None:
    """It compares gradients of equally many targets."""
    run = _program("gptj")
    state = run.abstract_state
    both, tokens = (
        jax.eval_shape(run.train_step, state, GIVEN)[1],
        jax.eval_shape(run.train_step, state, GIVEN.tokens)[1],
    )
    assert "noise/B_simple" in tokens
    assert {name for name in tokens if name not in both} == {"noise/G_noise", "noise/S_noise", "noise/B_simple"}
    assert {name for name in both if name not in tokens} == {"source_nll", "source_tokens"}


def test_a_learned_bias_of_distances_is_refused_by_name() -> None:
    run = small_program(SMALL["gptj_t5"])
    with pytest.raises(UserError, match=r'model\.pe "t5" .* data\.packing=concat'):
        run.train_step.lower(run.abstract_state, GIVEN)
    with pytest.raises(UserError, match=r'model\.pe "t5"'):
        run.eval_step.lower(run.abstract_state.params, GIVEN.map(lambda array: array[0]))
    # a mask alone needs no positions
    run.train_step.lower(run.abstract_state, GIVEN._replace(documents=None))


def test_positions_begin_anew_in_each_document() -> None:
    expected = [[place - row.index(number) for place, number in enumerate(row)] for row in _as_lists(GIVEN.documents)]
    found = jax.jit(positions_in_documents)(GIVEN.documents)
    np.testing.assert_array_equal(found.reshape(-1, LENGTH + 1), expected)


@pytest.mark.parametrize("replicas", [1, 4])
def test_weights_sum_to_the_microbatches_of_all_replicas(replicas: int) -> None:
    batch = jax.device_get(jax.jit(functools.partial(Batch.of, replicas=replicas))(GIVEN))
    np.testing.assert_array_equal(batch.weights > 0, COUNTED)
    np.testing.assert_allclose(batch.weights.sum(), MICROBATCHES * replicas, rtol=1e-6)
    assert np.unique(batch.weights).size == 2


def test_padding_has_no_part_in_the_statistics_of_a_router() -> None:
    """The statistics are those of the other tokens alone."""
    rng = np.random.default_rng(0)
    logits, real = rng.normal(size=(4, 10, 6)).astype(np.float32), rng.random((4, 10)) < 0.6

    @jax.jit
    def of(logits: jax.Array, real: jax.Array | None = None) -> dict[str, jax.Array]:
        return statistics(logits, route(RouterSpec(chosen=2, normalize=True), logits), real)

    found, expected, of_all = of(logits, real), of(logits[real][None]), of(logits)
    jax.tree.map(lambda ours, one: np.testing.assert_allclose(ours, one, rtol=1e-5), found, expected)
    assert not np.allclose(expected["balance"], of_all["balance"], rtol=1e-3)
    assert all(np.isfinite(value).all() for value in of(logits, real & False).values())


@pytest.mark.parametrize("mesh", covering(["dp4", "dp4_per_step", "dp2_pp2_per_step"], daily=(["dp4_per_step"],)))
def test_replicas_have_the_routers_losses_of_one_device(mesh: str) -> None:
    """Each replica has another number of tokens that are not padding."""
    of_mesh = _program("mixtral", mesh)
    one = _program("mixtral", layers=of_mesh.config.model.layers)
    found, expected = (run.train_step(run.init(jax.random.key(1)), GIVEN)[1] for run in (of_mesh, one))
    for name in ("experts/balance_loss", "experts/z_loss", "experts/largest_load", "train/grad_norm"):
        np.testing.assert_allclose(found[name], expected[name], rtol=CLOSE, err_msg=name)


def _as_lists(array: np.ndarray) -> list[list[int]]:
    return array.reshape(-1, array.shape[-1]).tolist()
