"""The training step's parts against plain definitions."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.builders import TINY, program, token_loss
from support.families import MODELS

from mesh_transformer.config import parse_config
from mesh_transformer.optimizers import adam
from mesh_transformer.train import noise_scale as noise
from mesh_transformer.train.optimizer import Optimizer
from mesh_transformer.train.step import lower_step

TOKENS = np.random.default_rng(0).integers(0, 512, (2, 8, 41)).astype(np.int32)


def _one_step(*overrides, tokens=TOKENS, **options):
    run = program(TINY, *overrides, **options)
    state = run.init(jax.random.key(0))
    before = jax.device_get(state)
    after, metrics = run.train_step(state, tokens)
    return before, jax.device_get(after), jax.device_get(metrics)


def test_microbatches_add_up_to_one_batch():
    _, split, split_metrics = _one_step("optimizer.warmup_steps=0")
    _, whole, whole_metrics = _one_step("optimizer.warmup_steps=0", tokens=TOKENS.reshape(1, 16, 41))
    np.testing.assert_allclose(split_metrics["train/loss"], whole_metrics["train/loss"], rtol=1e-6)
    np.testing.assert_allclose(split_metrics["train/grad_norm"], whole_metrics["train/grad_norm"], rtol=1e-5)
    moments = [state.opt_state["mu"] for state in (split, whole)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max()), *moments)
    assert "noise/B_simple" in split_metrics
    assert "noise/B_simple" not in whole_metrics


def test_a_step_is_lowered_for_the_length_of_the_data():
    """It may be less than the model's: preflight predicts such a step."""
    run = program(TINY, "data.seq=24")
    assert run.config.model.seq > 24
    (_, sequences), _ = lower_step(run, 2, 8).args_info
    assert sequences.tokens.shape == (2, 8, 25)


def test_accumulation_is_float32_under_bfloat16_compute():
    before, after, metrics = _one_step("optimizer.warmup_steps=0", dtype="bfloat16")
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves((after.params, after.opt_state["mu"])))
    _, _, exact = _one_step("optimizer.warmup_steps=0")
    np.testing.assert_allclose(metrics["train/loss"], exact["train/loss"], rtol=1e-2)  # bfloat16 has 8 bits
    assert metrics["train/loss"] != exact["train/loss"]
    # The mean of equal microbatches is each one's gradient. In bfloat16 twice a gradient is exact, three times is not.
    twice, thrice = (
        _one_step("optimizer.warmup_steps=0", dtype="bfloat16", tokens=np.repeat(TOKENS[:1], n, 0))[1] for n in (2, 3)
    )
    moments = [state.opt_state["mu"] for state in (thrice, twice)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max()), *moments)


def test_a_step_that_is_not_finite_is_reported_or_skipped():
    for policy in ("stop", "skip"):
        run = program(TINY, f"optimizer.nonfinite={policy}", "optimizer.warmup_steps=0")
        state = run.init(jax.random.key(0))
        state.params["head"]["logits"]["b"] = state.params["head"]["logits"]["b"].at[3].set(jnp.inf)
        kept = jax.device_get(state)
        after, metrics = run.train_step(state, TOKENS)
        assert not metrics["finite"]
        if policy == "skip":
            jax.tree.map(np.testing.assert_array_equal, dict(after.params), dict(kept.params))
            jax.tree.map(np.testing.assert_array_equal, after.opt_state, kept.opt_state)
            assert (int(after.step), int(after.skipped), int(metrics["skipped"])) == (1, 1, 1)
            assert np.isnan(after.noise.g)  # nothing entered the averages


TABLES = [("embed", "tokens", "w", 0), ("head", "logits", "w", 1), ("head", "logits", "b", 0)]


@pytest.mark.parametrize("mesh", [[], ["mesh.tp=2", "mesh.fsdp=2", "mesh.dp=2"]], ids=["one", "dp-fsdp-tp"])
def test_what_padding_rows_hold_enters_no_metric_and_no_update(mesh):
    """300 of 384 rows are the vocabulary. The gradient is clipped: a norm that counts padding would change the
    update."""
    run = program(TINY, "model.n_vocab=300", "optimizer.warmup_steps=0", *mesh, devices=8 if mesh else 1)

    def two_steps(padding):
        state, seen = run.init(jax.random.key(0)), []
        for stage, module, field, axis in TABLES:
            module = state.params[stage][module]
            table = np.array(module[field])
            np.moveaxis(table, axis, 0)[300:] *= padding
            np.moveaxis(table, axis, 0)[300:] += padding
            module[field] = jax.device_put(table, module[field].sharding)
        for _ in range(2):
            state, metrics = run.train_step(state, TOKENS % 300)
            seen.append(jax.device_get(metrics))
        return seen, jax.device_get(state.params["blocks"])

    empty, full = two_steps(0), two_steps(1000)
    assert empty[0][0]["train/grad_norm"] > 1  # clip_norm
    jax.tree.map(np.testing.assert_array_equal, empty, full)


def test_noise_scale_equals_its_definition():
    """Appendix A.1 of McCandlish et al.: |G|^2 and tr(Sigma) from two batch sizes, then averages."""
    rng = np.random.default_rng(0)
    averages, expected_g, expected_s = noise.NoiseAverages.empty(), None, None
    for _ in range(3):
        small_square, big_square = rng.uniform(2, 3), rng.uniform(1, 2)
        averages, metrics = noise.update_noise(averages, 0.1, 8, small_square, 32, big_square)
        g = (32 * big_square - 8 * small_square) / (32 - 8)
        s = (small_square - big_square) / (1 / 8 - 1 / 32)
        expected_g = g if expected_g is None else 0.9 * expected_g + 0.1 * g
        expected_s = s if expected_s is None else 0.9 * expected_s + 0.1 * s
        np.testing.assert_allclose([metrics["G_noise"], metrics["S_noise"]], [g, s], rtol=1e-5)
        np.testing.assert_allclose(metrics["B_simple"], expected_s / expected_g, rtol=1e-5)


def test_noise_scale_estimates_a_known_gaussian():
    """Gradients drawn as G + N(0, Sigma): the estimates average to |G|^2 and tr(Sigma)."""
    rng = np.random.default_rng(0)
    mean, sigma, small, micro = rng.normal(size=50), 2.0, 4, 8
    totals = np.zeros(2)
    for _ in range(400):
        batches = mean + sigma * rng.normal(size=(micro, small, 50)).mean(1)
        squares = np.square(batches).sum(-1).mean(), np.square(batches.mean(0)).sum()
        _, metrics = noise.update_noise(noise.NoiseAverages.empty(), 0.1, small, squares[0], micro * small, squares[1])
        totals += metrics["G_noise"], metrics["S_noise"]
    np.testing.assert_allclose(totals / 400, [np.square(mean).sum(), sigma**2 * 50], rtol=0.02)


# of the families, the arrays that do not decay
BIASES_AND_NORMS = ("b", "bias", "in_b", "out_b", "scale", "offset")


@pytest.mark.parametrize(
    ("name", "decayed"),
    [
        ("gpt2", ["embed/tokens/w", "embed/positions/w"]),
        ("gptj", ["embed/tokens/w", "head/logits/w", "relative/w"]),
        ("qwen2_moe", ["ff/router/w", "ff/shared_gate/w", "ff/experts/in", "head/logits/w"]),
        pytest.param("jaxformer", ["ff/router/w", "ff/experts/in", "attention/k_r/w"], marks=pytest.mark.nightly),
    ],
)
def test_all_but_biases_and_norms_decay(name, decayed):
    model = {**TINY["model"], "pe": "t5", "pe_rotary_dims": None} if name == "gptj" else MODELS[name]
    arrays = parse_config({"model": model}).model.decoder().arrays()
    params = {path: np.ones(array.shape, np.float32) for path, array in arrays.items()}
    config = adam.AdamConfig(weight_decay=0.5, warmup_steps=0, lr=1.0, end_lr=1.0)
    optimizer = Optimizer(config, {path: array.axes for path, array in arrays.items()})
    updates, _ = optimizer.update(jax.tree.map(np.zeros_like, params), optimizer.init(params), params)
    for path, update in updates.items():
        decays = path.rpartition("/")[2] not in BIASES_AND_NORMS
        np.testing.assert_array_equal(update, np.full(update.shape, -0.5 if decays else 0.0), err_msg=path)
    assert all(any(path.endswith(end) for path in arrays) for end in decayed)


def test_bfloat16_moments_follow_the_float32_ones():
    axes = {"layer": {"w": (None, None)}}
    params = {"layer": {"w": np.ones((4, 4), np.float32)}}
    gradient = {"layer": {"w": np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)}}
    updates = {}
    for dtype in ("float32", "bfloat16"):
        optimizer = Optimizer(adam.AdamConfig(moments_dtype=dtype, warmup_steps=0, lr=1e-2), axes)
        state = optimizer.init(params)
        for _ in range(3):
            updates[dtype], state = optimizer.update(gradient, state, params)
        assert state["mu"]["layer"]["w"].dtype == dtype
        assert state["nu"]["layer"]["w"].dtype == dtype
    np.testing.assert_allclose(updates["bfloat16"]["layer"]["w"], updates["float32"]["layer"]["w"], rtol=0.02)


@pytest.mark.parametrize("kind", ["classic", "log_z"])
def test_the_two_z_losses(kind):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2, 5, 30)).astype(np.float32) + 3
    losses = token_loss(logits, rng.integers(0, 30, (2, 5)).astype(np.int32))
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    if kind == "classic":
        np.testing.assert_allclose(losses.shifted_log_z, log_z - logits.max(-1), rtol=1e-5)
    else:
        np.testing.assert_allclose(losses.log_z, log_z, rtol=1e-6)


def test_the_kind_of_z_loss_reaches_the_training_loss():
    _, _, classic = _one_step("optimizer.z_loss=0.1")
    _, _, exact = _one_step("optimizer.z_loss=0.1", "optimizer.z_loss_kind=log_z")
    _, _, none = _one_step("optimizer.z_loss=0")
    assert none["train/loss"] < classic["train/loss"]
    assert abs(classic["train/loss"] - exact["train/loss"]) > 1e-4


def test_loss_of_uniform_logits_is_the_log_of_the_vocabulary():
    losses = token_loss(np.zeros((1, 2, 64), np.float32), np.array([[3, 5]], np.int32))
    np.testing.assert_allclose(losses.nll, np.log(64), rtol=1e-6)


def test_evaluation_has_no_z_loss():
    raw = copy.deepcopy(TINY)
    run = program(raw, "optimizer.z_loss=1.0")
    params = run.init(jax.random.key(0)).params
    result = run.eval_step(params, TOKENS[0])
    logits, _ = run.model.apply(params, TOKENS[0][:, :-1])
    expected = token_loss(logits, TOKENS[0][:, 1:]).nll
    np.testing.assert_allclose(result["loss"], expected.mean(), rtol=1e-6)
    np.testing.assert_allclose(result["last_loss"], expected[:, -1].mean(), rtol=1e-6)
