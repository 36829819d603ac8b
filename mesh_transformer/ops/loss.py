"""Cross-entropy over a vocabulary that may be sharded.

Shapes: B sequences, T positions, D residual width, V vocabulary rows, C chunks of positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange


class TokenLoss(NamedTuple):
    """Per-token results, each (B, T)."""

    nll: jax.Array  # float32, nats
    log_z: jax.Array  # float32, log of the softmax's normaliser
    shifted_log_z: (
        jax.Array
    )  # float32, the same after subtracting the largest logit: the classic z-loss's term
    correct: jax.Array  # bool: the target has the largest logit


def token_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> TokenLoss:
    """Softmax cross-entropy of float32 logits; rows at -inf take no part.

    The target's logit is a masked sum, not a gather, so that logits stay sharded over the vocabulary.
    """
    largest = jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))
    shifted = logits_BTV - largest
    shifted_log_z = jnp.log(jnp.exp(shifted).sum(-1))
    rows = jax.lax.broadcasted_iota(targets_BT.dtype, shifted.shape, 2)
    target = jnp.where(rows == targets_BT[..., None], shifted, 0).sum(-1)
    return TokenLoss(shifted_log_z - target, shifted_log_z + largest[..., 0], shifted_log_z, target == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def mean_loss(
    logits_of: Callable[[Any, jax.Array], jax.Array],
    objective: Callable[[TokenLoss], jax.Array],
    chunks: int,
    params: Any,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
) -> tuple[jax.Array, TokenLoss]:
    """The mean over all tokens of `objective(token_loss(logits_of(params, x), targets))`, and the token losses.

    The positions go through the head in `chunks` equal parts, so that only that part of the logits exists at
    a time. Under differentiation a part's gradient is taken as soon as its loss is known, and nothing is computed
    twice: the mean's cotangent is one number, by which the finished gradients are multiplied. The token
    losses are for metrics: no gradient flows through them.

    Args:
        logits_of: (params, (B, t, D)) -> float32 logits (B, t, V), each position on its own.
        objective: token losses -> (B, t), the term of each token.
        chunks: a divisor of T.
        params: of the head.
    """
    parts = _split(chunks, x_BTD), _split(chunks, targets_BT)
    terms, per_token = jax.lax.map(lambda part: _terms(logits_of, objective, params, *part), parts)
    return terms.mean(), jax.tree.map(_join, per_token)


def _mean_loss_forward(
    logits_of: Any, objective: Any, chunks: int, params: Any, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[tuple[jax.Array, TokenLoss], tuple[Any, jax.Array]]:
    def part(total: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        x_BtD, targets_Bt = xs

        def loss(params: Any, x_BtD: jax.Array) -> tuple[jax.Array, TokenLoss]:
            terms, per_token = _terms(logits_of, objective, params, x_BtD, targets_Bt)
            return terms.sum() / targets_BT.size, per_token

        (value, per_token), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x_BtD)
        return jax.tree.map(jnp.add, total, gradients[0]), (value, per_token, gradients[1])

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    if chunks == 1:
        total, (value, per_token, dx_BTD) = part(zeros, (x_BTD, targets_BT))
    else:
        xs = _split(chunks, x_BTD), _split(chunks, targets_BT)
        total, (values, *parts) = jax.lax.scan(part, zeros, xs)
        value, (per_token, dx_BTD) = values.sum(), jax.tree.map(_join, tuple(parts))
    total = jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)
    return (value, per_token), (total, dx_BTD)


def _mean_loss_backward(
    logits_of: Any, objective: Any, chunks: int, gradients: tuple[Any, jax.Array], cotangents: Any
) -> tuple[Any, jax.Array, None]:
    params, dx_BTD = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients)
    return params, dx_BTD, None


mean_loss.defvjp(_mean_loss_forward, _mean_loss_backward)


def _terms(
    logits_of: Any, objective: Any, params: Any, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[jax.Array, TokenLoss]:
    per_token = token_loss(logits_of(params, x_BTD), targets_BT)
    return objective(per_token), per_token


def _split(chunks: int, x_BT: jax.Array) -> jax.Array:
    return rearrange(x_BT, "b (c t) ... -> c b t ...", c=chunks)


def _join(x_CBT: jax.Array) -> jax.Array:
    return rearrange(x_CBT, "c b t ... -> b (c t) ...")
