"""The step of routers' biases and the losses of routers, against their definitions."""

import numpy as np
import pytest

from mesh_transformer.config import ExpertsConfig
from mesh_transformer.train import experts

ROUTER = "ff/router"

# of two layers: the share of the choices that each of four experts has
SHARES = np.asarray([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]], np.float32)


def test_an_expert_with_less_than_the_mean_load_gets_a_larger_bias() -> None:
    """Wang et al. 2024: b + rate * sign(mean load - load)."""
    bias = np.arange(8, dtype=np.float32).reshape(2, 4)
    params = {"blocks": {ROUTER: {"bias": bias, "w": bias}, "other": {"w": bias}}, "head": {"w": bias}}
    found = experts.updated_bias(params, {"share_E": SHARES}, 0.5)
    np.testing.assert_array_equal(
        found["blocks"][ROUTER]["bias"] - bias, 0.5 * np.asarray([[-1, 0, 1, 1], [1, 1, -1, -1]])
    )
    assert found["blocks"][ROUTER]["w"] is bias
    assert found["blocks"]["other"] is params["blocks"]["other"]
    assert experts.updated_bias(params, {"share_E": SHARES}, 0.0) is params


def test_losses_and_metrics_of_routers() -> None:
    weights, layers = ExpertsConfig(balance_loss=0.25, z_loss=0.5), 2
    means = {"balance": np.float32([1.5, 2.5]), "z": np.float32([4.0, 8.0]), "dropped": np.float32([0.0, 0.5])}
    of_layers = [
        experts.router_loss(weights, layers, {name: mean[layer] for name, mean in means.items()})
        for layer in range(layers)
    ]
    assert sum(of_layers) == pytest.approx(0.25 * 2.0 + 0.5 * 6.0)
    found = experts.metrics({**means, "share_E": SHARES})
    expected = {"largest_load": 2.0, "smallest_load": 0.4, "balance_loss": 2.0, "z_loss": 6.0, "dropped": 0.25}
    assert found == {f"experts/{name}": pytest.approx(value) for name, value in expected.items()}
