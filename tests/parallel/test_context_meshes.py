"""Training with sequences whose positions are split over devices (mesh.cp), against the same run on one device."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from support.builders import TINY, program
from support.covering import sampled
from support.families import MODELS

from mesh_transformer.train.step import TrainProgram

MESHES = {
    "cp4": ["mesh.cp=4"],
    "cp2_fsdp2_tp2": ["mesh.cp=2", "mesh.fsdp=2", "mesh.tp=2"],
    "cp2_dp2_tp2_sequence": ["mesh.cp=2", "mesh.dp=2", "mesh.tp=2", "mesh.shard_activations=true", "mesh.zero1=true"],
}
DEVICES = {"cp4": 4}
MODES = ["zigzag", "ring", "ulysses", "gather"]
REMAT = ["none", "full", "save_attn", "save_matmuls"]
CUT = {"layers": 2, "seq": 40, "n_vocab": 1024}
FAMILIES: dict[str, dict[str, Any]] = {
    "gptj": {**TINY["model"], **CUT},
    "gptj_t5": {**TINY["model"], **CUT, "pe": "t5"},
    "gptj_learned": {**TINY["model"], **CUT, "pe": "fixed"},
    **{name: {**MODELS[name], **CUT} for name in ("gpt_neox", "qwen2", "gemma2", "mistral")},
}
STEPS, ROWS = 20, 4
# few tokens, so that the gradients of all sequences have much in common: the noise scale is then well conditioned
TOKENS = np.random.default_rng(0).integers(0, 16, (STEPS, 2, ROWS, 41)).astype(np.int32)
# float32 sums in another order; the gradient noise scale is a difference of two nearly equal numbers
CLOSE, CLOSE_NOISE = 1e-5, 1e-4
EXACT = ("train/loss", "train/last_loss", "train/grad_norm", "train/param_norm")


def on(family: str, mesh: str | None, mode: str = "zigzag", remat: str = "none") -> TrainProgram:
    model = FAMILIES[family]
    changes = {**TINY["optimizer"], "lr": 1e-3, "anneal_steps": STEPS}
    # several chunks of the loss on each device
    raw = {"model": model, "optimizer": changes, "data": {"batch_size": ROWS}, "compute": {"logits_mib": 1}}
    axes = [*MESHES[mesh], f"mesh.context_mode={mode}"] if mesh else []
    return program(raw, *axes, devices=DEVICES.get(mesh, 8) if mesh else 1, remat=remat)


def trained(run: TrainProgram) -> Any:
    """The initial parameters, Adam's first moment after one step, which is the gradient times a number, the metrics of
    all steps, and the validation's."""
    state = run.init(jax.random.key(1))
    params = jax.device_get(state.params)
    gradient, steps = None, []
    for tokens in TOKENS:
        state, metrics = run.train_step(state, tokens)
        steps.append(jax.device_get(metrics))
        gradient = jax.device_get(state.opt_state["mu"]) if gradient is None else gradient
    return params, gradient, steps, jax.device_get(run.eval_step(state.params, TOKENS[0, 0]))


@functools.cache
def on_one_device(family: str) -> Any:
    return trained(on(family, None))


@pytest.mark.parametrize(("family", "mesh", "mode", "remat"), sampled(FAMILIES, MESHES, MODES, REMAT, at_most=2))
def test_training_equals_one_device(family: str, mesh: str, mode: str, remat: str) -> None:
    params, gradient, steps, validation = trained(on(family, mesh, mode, remat))
    one_params, one_gradient, one_steps, one_validation = on_one_device(family)
    jax.tree.map(np.testing.assert_array_equal, params, one_params)
    jax.tree.map(
        lambda ours, one: np.testing.assert_allclose(ours, one, rtol=0, atol=CLOSE * np.abs(one).max()),
        gradient,
        one_gradient,
    )
    for name in EXACT:
        np.testing.assert_allclose([m[name] for m in steps], [m[name] for m in one_steps], rtol=CLOSE, err_msg=name)
    for name in ("noise/G_noise", "noise/S_noise", "noise/B_simple"):
        ours, one = ([m[name] for m in all_steps] for all_steps in (steps, one_steps))
        # single values can be near zero
        np.testing.assert_allclose(ours, one, rtol=0, atol=CLOSE_NOISE * np.abs(one).max(), err_msg=name)
    for name, value in one_validation.items():
        np.testing.assert_allclose(validation[name], value, rtol=CLOSE, err_msg=name)
