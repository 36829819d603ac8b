"""A short training run on a mesh, compared with the same run on one device."""

import functools
import json
import os
from typing import Any

import jax
import numpy as np

from mesh_transformer.train.step import TrainProgram
from support.builders import TINY, program
from support.families import MODELS
from support.ties import recorded

_CUT = {"layers": 2, "seq": 40, "n_vocab": 1024}
# the group `model` of a config, by name: 40 positions, 8 heads
SMALL: dict[str, dict[str, Any]] = {
    "gptj": {**TINY["model"], **_CUT},
    "gptj_t5": {**TINY["model"], **_CUT, "pe": "t5"},
    "gptj_learned": {**TINY["model"], **_CUT, "pe": "fixed"},
    **{name: {**model, **_CUT} for name, model in MODELS.items()},
}
# .ci/nightly draws a seed, and trains for longer
STEPS, ROWS = 4 if os.environ["TESTS_SEED"] == "0" else 20, 4
# of models with experts: the fewer tokens, the fewer have nearly equal scores for two experts (`ties`)
FEW_STEPS, SEEDS = 2, 30
# few tokens, so that the gradients of all sequences have much in common: the noise scale is then well conditioned
_TOKENS = np.random.default_rng(0).integers(0, 16, (STEPS, 6 * ROWS, 41)).astype(np.int32)
_EVALUATED = 2 * ROWS
# float32 sums in another order; the gradient noise scale is a difference of two nearly equal numbers
CLOSE, CLOSE_NOISE = 1e-5, 1e-4
# A gradient below this share of the model's largest one is a rounding error of zero: the gradient of the bias of keys,
# where keys are not rotated, is a sum that cancels. Measured: 1e-9.
ZERO = 1e-8
_EXACT = ("train/loss", "train/last_loss", "train/grad_norm", "train/param_norm")
_NOISE = ("noise/G_noise", "noise/S_noise", "noise/B_simple")


def small_program(
    model: dict[str, Any], *overrides: str, devices: int = 1, remat: str = "none", microbatches: int = 2
) -> TrainProgram:
    """The program of a model of SMALL, with several chunks of the loss on each device."""
    optimizer = {**TINY["optimizer"], "lr": 1e-3, "anneal_steps": STEPS, "gradient_accumulation_steps": microbatches}
    raw = {"model": model, "optimizer": optimizer, "data": {"batch_size": ROWS}, "compute": {"logits_mib": 1}}
    return program(raw, *overrides, devices=devices, remat=remat)


def trained(run: TrainProgram, seed: int = 1) -> Any:
    """Train on the tokens: STEPS steps, or FEW_STEPS of a model with experts. Returns the initial parameters, Adam's
    first moment after one step, which is the gradient times a number, the metrics of all steps, and the
    validation's."""
    state = run.init(jax.random.key(seed))
    params = jax.device_get(state.params)
    gradient, steps = None, []
    accumulation, rows = run.config.optimizer.gradient_accumulation_steps, run.config.data.batch_size
    assert rows is not None
    count = FEW_STEPS if run.model.decoder.experts else STEPS
    for tokens in _TOKENS[:count, : accumulation * rows].reshape(count, accumulation, rows, -1):
        state, metrics = run.train_step(state, tokens)
        steps.append(jax.device_get(metrics))
        gradient = jax.device_get(state.opt_state["mu"]) if gradient is None else gradient
    return params, gradient, steps, jax.device_get(run.eval_step(state.params, _TOKENS[0, :_EVALUATED]))


@functools.cache
def _on_one_device(model: str, microbatches: int, rows: int) -> tuple[int, Any]:
    """The seed of the parameters, and the results of `trained`."""
    run = small_program(json.loads(model), f"data.batch_size={rows}", microbatches=microbatches)
    if run.model.decoder.experts is None:
        return 1, trained(run)
    with recorded() as ties:
        for seed in range(1, SEEDS):
            found = trained(run, seed)
            jax.effects_barrier()
            if not any(ties):
                return seed, found
            ties.clear()
    raise AssertionError(f"the routers of each of {SEEDS} models have nearly equal scores for some tokens")


def assert_equals_one_device(
    model: dict[str, Any],
    *overrides: str,
    devices: int = 8,
    remat: str = "none",
    microbatches: int = 2,
    parts: int = 1,
) -> TrainProgram:
    """Train on a mesh and on one device; compare parameters, gradients, metrics and validation. Returns the
    program on the mesh.

    Args:
        parts: into which one device divides each microbatch: the replicas that sum their gradients once a step.
    """
    run = small_program(model, *overrides, devices=devices, remat=remat, microbatches=microbatches)
    rows = (run.config.data.batch_size or ROWS) // parts
    one = _on_one_device(json.dumps(model), microbatches * parts, rows)
    seed, (one_params, one_gradient, one_steps, one_validation) = one
    params, gradient, steps, validation = trained(run, seed)
    jax.tree.map(np.testing.assert_array_equal, params, one_params)
    zero = ZERO * max(np.abs(one).max() for one in jax.tree.leaves(one_gradient))
    jax.tree.map(
        lambda ours, one: np.testing.assert_allclose(ours, one, rtol=0, atol=_tolerance(one, zero)),
        gradient,
        one_gradient,
    )
    for name in (*_EXACT, *(name for name in one_steps[0] if name.startswith("experts/"))):
        np.testing.assert_allclose([m[name] for m in steps], [m[name] for m in one_steps], rtol=CLOSE, err_msg=name)
    # the stages do not sum the gradient of a microbatch
    stages = run.placement.size("layers") > 1
    assert all(("train/grad_norm_micro" in m, "noise/B_simple" in m) == (not stages,) * 2 for m in steps)
    for name in () if stages else _NOISE:
        ours, one = ([m[name] for m in all_steps] for all_steps in (steps, one_steps))
        # single values can be near zero
        np.testing.assert_allclose(ours, one, rtol=0, atol=CLOSE_NOISE * np.abs(one).max(), err_msg=name)
    for name, value in one_validation.items():
        np.testing.assert_allclose(validation[name], value, rtol=CLOSE, err_msg=name)
    return run


def _tolerance(one: np.ndarray, zero: float) -> float:
    largest = float(np.abs(one).max())
    return 2 * zero if largest < zero else CLOSE * largest
