"""Which experts a token goes to, with which weights, and how evenly the tokens are spread.

Everything is float32: with bfloat16 logits, more than a hundredth of the tokens would go to other experts.

Shapes: B sequences, T positions, E experts, k chosen experts of a token, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.parallel.sharding import active
from mesh_transformer.spec import RouterSpec


class Routing(NamedTuple):
    """The choices of all tokens."""

    # float32: what the output of each chosen expert is multiplied by
    weights_BTk: jax.Array
    # int32: the experts of a token differ
    experts_BTk: jax.Array
    # float32: the scores of all experts, with a sum of 1
    probs_BTE: jax.Array


Scores = Callable[[jax.Array], jax.Array]


def _shares(scores_BTE: jax.Array) -> jax.Array:
    # all scores of a token are 0 only by underflow
    return scores_BTE / (scores_BTE.sum(-1, keepdims=True) + 1e-20)


# the scores of `RouterSpec`: logits -> scores, and scores -> scores with a sum of 1
_SCORES: dict[str, tuple[Scores, Scores]] = {
    "softmax": (jax.nn.softmax, lambda scores_BTE: scores_BTE),
    "sigmoid": (jax.nn.sigmoid, _shares),
}


def _greatest(scores_BTGE: jax.Array) -> jax.Array:
    return scores_BTGE.max(-1)


def _two_best(scores_BTGE: jax.Array) -> jax.Array:
    return jax.lax.top_k(scores_BTGE, 2)[0].sum(-1)


# the scores of groups: the scores of a group's experts -> its score; and the number that replaces the scores of experts
# outside of the best groups: 0 in DeepSeek-V2, which has no negative scores, and -inf in V3
_GROUP_SCORES: dict[str, tuple[Scores, float]] = {"max": (_greatest, 0.0), "two_best": (_two_best, -jnp.inf)}


def route(router: RouterSpec, logits_BTE: jax.Array, bias_E: jax.Array | None = None) -> Routing:
    """The choices of a router, from logits of float32. No gradient goes through the choice, nor to the bias."""
    scores_of, probs_of = _SCORES[router.scores]
    scores_BTE = scores_of(logits_BTE)
    ranked_BTE = jax.lax.stop_gradient(scores_BTE)
    if bias_E is not None:
        ranked_BTE += jax.lax.broadcast_to_rank(jax.lax.stop_gradient(bias_E), 3)
    if router.groups > 1:
        ranked_BTE = _of_best_groups(router, ranked_BTE)
    experts_BTk = jax.lax.top_k(ranked_BTE, router.chosen)[1]
    weights_BTk = jnp.take_along_axis(scores_BTE, experts_BTk, axis=-1)
    if router.normalize:
        weights_BTk /= weights_BTk.sum(-1, keepdims=True) + router.eps
    probs_BTE = probs_of(scores_BTE)
    return Routing(weights_BTk * router.scale, experts_BTk, probs_BTE)


def _of_best_groups(router: RouterSpec, ranked_BTE: jax.Array) -> jax.Array:
    """The scores, lowered for the experts outside of the best groups."""
    grouped = rearrange(ranked_BTE, "b t (g e) -> b t g e", g=router.groups)
    score_of, outside = _GROUP_SCORES[router.group_score]
    best = jax.lax.top_k(score_of(grouped), router.top_groups)[1]
    kept_BTG = jax.nn.one_hot(best, router.groups, dtype=bool).any(-2)
    return rearrange(jnp.where(kept_BTG[..., None], grouped, outside), "b t g e -> b t (g e)")


def statistics(logits_BTE: jax.Array, routing: Routing, real_BT: jax.Array | None = None) -> dict[str, jax.Array]:
    """How evenly a layer's tokens are spread over the experts, float32.

    Args:
        real_BT: bool: the tokens that count, or None for all tokens.

    Returns:
        The statistics by name.

        - share_E: the share of the choices that each expert has, over all devices.
        - balance: E * sum over e of f_e P_e, with the share f_e of the choices, without a gradient, and the mean P_e of
          the probabilities: 1 if both are even (Fedus et al. 2021, arXiv:2101.03961).
        - z: the mean over the tokens of logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906).

    Inside of a `shard_map` that splits the batch, balance and z are means over the tokens of a part. The balance is
    linear in P, and f counts all tokens, so the means over all parts are the means over all tokens: with `real_BT`, a
    part has the weight of its tokens that count.
    """
    experts = routing.probs_BTE.shape[-1]
    chosen_BTkE = jax.nn.one_hot(routing.experts_BTk, experts, dtype=jnp.float32)
    probs_BTE, squares_BT = routing.probs_BTE, jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
    if real_BT is not None:
        # a mean of 1 over the tokens of all devices
        real_BT = real_BT.astype(jnp.float32)
        weights_BT = real_BT * (total(jnp.float32(real_BT.size)) / jnp.maximum(total(real_BT.sum()), 1))
        chosen_BTkE *= real_BT[..., None, None]
        probs_BTE, squares_BT = probs_BTE * weights_BT[..., None], squares_BT * weights_BT
    load_E = total(chosen_BTkE.sum((0, 1, 2)))
    share_E = load_E / jnp.maximum(load_E.sum(), 1)
    balance = experts * jnp.sum(share_E * probs_BTE.mean((0, 1)))
    return {"share_E": share_E, "balance": balance, "z": squares_BT.mean()}


def total(x: jax.Array) -> jax.Array:
    """The sum of `x` over the devices that split the batch by a `shard_map` around this code. No gradient."""
    partition = active()
    axes = () if partition is None else partition.taken("batch", "seq")
    x = jax.lax.stop_gradient(x)
    return jax.lax.psum(x, axes) if axes else x
