"""Losses, biases and metrics of routed experts, from the means of their layers (`ops.experts.statistics`).

Shapes: L layers with experts, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mesh_transformer.config.experts import ExpertsConfig
from mesh_transformer.models.feed_forward import ROUTER
from mesh_transformer.models.model import Params
from mesh_transformer.models.modules import Means
from mesh_transformer.train.schedule import Metrics

# the metric with a number for each layer and expert
LOAD = "experts/load"


def router_loss(weights: ExpertsConfig, layers: int, means: Means) -> jax.Array:
    """The losses of the router of one of `layers` layers. Those of all layers add up to the means over layers."""
    return (weights.balance_loss * means["balance"] + weights.z_loss * means["z"]) / layers


def load(means: Means) -> jax.Array:
    """The tokens of each expert over the mean of its layer, (L, E)."""
    share_LE = means["share_E"]
    return share_LE * share_LE.shape[-1]


def metrics(means: Means) -> Metrics:
    """Scalars of a step: the largest and the smallest load over the mean, of any expert; the share of dropped choices;
    and the means over layers of both losses, before their weights."""
    load_LE = load(means)
    return {
        "experts/largest_load": load_LE.max(),
        "experts/smallest_load": load_LE.min(),
        "experts/balance_loss": means["balance"].mean(),
        "experts/z_loss": means["z"].mean(),
        "experts/dropped": means["dropped"].mean(),
    }


def updated_bias(params: Params, means: Means, rate: float) -> Params:
    """The parameters after the step of the biases: + rate for an expert with less than the mean load, - rate for one with
    more (Wang et al. 2024, arXiv:2408.15664). The same if `params` has no biases of routers.

    Args:
        means: over all microbatches of the step.
    """
    # the trained part of the parameters may have no layers
    router = params.get("blocks", {}).get(ROUTER, {})
    if "bias" not in router or rate == 0:
        return params
    change_LE = rate * jnp.sign(1 - load(means))
    return {**params, "blocks": {**params["blocks"], ROUTER: {**router, "bias": router["bias"] + change_LE}}}
