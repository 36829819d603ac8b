"""Pure functions against the original's numbers."""

import jax
import numpy as np
import pytest

from mesh_transformer.models.modules import t5_buckets
from mesh_transformer.ops.positions import rotate, rotation
from mesh_transformer.optimizers import adam
from mesh_transformer.spec import Rotary
from mesh_transformer.train.optimizer import schedule_of

FUNCTIONS = "fn_misc.npz"


def test_rotary(original):
    expected = np.load(original / FUNCTIONS)
    x_THK = expected["rotary/x"]
    rotary, positions_BT = Rotary(dims=x_THK.shape[-1], style="pairs", precision="float64"), np.arange(len(x_THK))[None]
    angles = rotation(rotary, positions_BT, len(x_THK))
    np.testing.assert_allclose(
        angles.sin_BTR[0], expected["rotary/sin"], rtol=0, atol=1e-7
    )  # float64 there, float32 here
    np.testing.assert_allclose(angles.cos_BTR[0], expected["rotary/cos"], rtol=0, atol=1e-7)
    y_BTHK = rotate(x_THK[None], angles, "pairs")
    np.testing.assert_allclose(y_BTHK[0], expected["rotary/y"], rtol=0, atol=1e-6)


def test_rotary_leaves_the_other_dims_alone():
    x_BTHK = np.random.default_rng(0).normal(size=(1, 5, 2, 8)).astype(np.float32)
    y_BTHK = rotate(x_BTHK, rotation(Rotary(dims=4, style="pairs"), np.arange(5)[None], 5), "pairs")
    np.testing.assert_array_equal(y_BTHK[..., 4:], x_BTHK[..., 4:])
    assert np.abs(y_BTHK[:, 1:, :, :4] - x_BTHK[:, 1:, :, :4]).max() > 0.1


def test_t5_buckets(original):
    expected = np.load(original / FUNCTIONS)
    ahead = expected["t5_bucket/memory_minus_context"]
    ours = t5_buckets(int(-ahead.min()) + 1)
    np.testing.assert_array_equal(ours[np.maximum(-ahead, 0)], expected["t5_bucket/bucket"])


def test_gelu_is_the_tanh_form(original):
    expected = np.load(original / FUNCTIONS)
    np.testing.assert_allclose(jax.nn.gelu(expected["gelu/x"], approximate=True), expected["gelu/y"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("sched_tiny", {"lr": 1.2e-3, "end_lr": 1.2e-4, "warmup_steps": 3, "anneal_steps": 300}),
        ("sched_6b", {"lr": 1.2e-4, "end_lr": 1.2e-5, "warmup_steps": 3000, "anneal_steps": 300000}),
    ],
)
def test_schedule(original, name, config):
    expected = np.load(original / FUNCTIONS)
    ours = [schedule_of(adam.AdamConfig(**config))(step) for step in expected[f"{name}/step"]]
    # float32 of the schedule's own arithmetic, against the original's float32
    np.testing.assert_allclose(ours, expected[f"{name}/lr"], rtol=2e-6, atol=1e-12)


def test_schedule_without_warmup_starts_at_the_peak():
    config = adam.AdamConfig(lr=1e-3, end_lr=1e-4, warmup_steps=0, anneal_steps=10)
    assert float(schedule_of(config)(0)) == pytest.approx(1e-3)
    assert float(schedule_of(config)(10)) == pytest.approx(1e-4)
    assert float(schedule_of(config)(1000)) == pytest.approx(1e-4)
