"""Losses, biases and metrics of routed experts, from the means of their layers (`ops.experts.statistics`).

Shapes: L layers with experts, E experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mesh_transformer.config import ExpertsConfig
from mesh_transformer.models.feed_forward import is_router
from mesh_transformer.models.stack import Means
from mesh_transformer.parallel.sharding import Params
from mesh_transformer.train.schedule import Metrics

# the metric with a number for each layer and expert
LOAD = "experts/load"


def router_loss(weights: ExpertsConfig, layers: int, means: Means) -> jax.Array:
    """The weighted losses of one router, over `layers`: the results of all layers add up to the means over layers."""
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
    """The parameters after the step of the biases: + rate for an expert with less than the mean load, - rate for one
    with more (Wang et al. 2024, arXiv:2408.15664). Parameters without biases of routers do not change.

    Args:
        means: over all microbatches of the step.
    """
    # the trained part of the parameters may have no layers
    blocks = params.get("blocks", {})
    routers = [module for module in blocks if is_router(module) and "bias" in blocks[module]]
    if not routers or rate == 0:
        return params
    changes_LE, updated = rate * jnp.sign(1 - load(means)), dict(blocks)
    # the groups' stacks one after the other
    for module in sorted(routers, key=lambda name: int(name.partition("/")[0]) if len(routers) > 1 else 0):
        bias_LE = blocks[module]["bias"]
        updated[module] = {**blocks[module], "bias": bias_LE + changes_LE[: len(bias_LE)]}
        changes_LE = changes_LE[len(bias_LE) :]
    return {**params, "blocks": updated}
