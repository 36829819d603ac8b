"""Cross-entropy over a vocabulary that may be sharded, and may be in parts ("tiles") of which one is computed at a time.

Shapes: B sequences, T positions, D residual width, V vocabulary rows, K tiles of C rows each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

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


class TiledHead(Protocol):
    """The last matrix of a model with its vocabulary in `tiles` equal parts. Hashable."""

    @property
    def tiles(self) -> int:
        """K."""

    def cut(self, params: Any) -> Any:
        """The parameters with a first dimension of K."""

    def add(self, total: Any, number: jax.Array, gradients: Any) -> Any:
        """`total`, like the parameters before they were cut, with the gradients of tile `number` added."""

    def logits(self, params: Any, number: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """(B, T, C) float32 logits of tile `number`, whose parameters these are; -inf in rows that are no token's."""

    def rows(self, number: jax.Array) -> jax.Array:
        """(C,) int32: the tokens of a tile."""


class Normaliser(NamedTuple):
    """The softmax's normaliser of each position, summed tile by tile with the largest logit so far as its offset.

    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """

    largest: jax.Array  # float32
    total: jax.Array  # float32: of exp(logit - largest)

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Normaliser:
        """Of no logits."""
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape))

    def add(self, logits_C: jax.Array) -> tuple[Normaliser, jax.Array]:
        """With (..., C) more logits, at least one of all so far finite; and exp(logit - largest) of these."""
        largest = jnp.maximum(self.largest, jax.lax.stop_gradient(logits_C.max(-1)))
        exps_C = jnp.exp(logits_C - largest[..., None])
        return Normaliser(largest, self.total * jnp.exp(self.largest - largest) + exps_C.sum(-1)), exps_C

    def token_loss(self, target: jax.Array) -> TokenLoss:
        """The losses of tokens whose logits are `target`."""
        shifted, log_total = target - self.largest, jnp.log(self.total)
        return TokenLoss(log_total - shifted, log_total + self.largest, log_total, shifted == 0)


def token_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> TokenLoss:
    """Softmax cross-entropy of float32 logits; rows at -inf take no part."""
    hits_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    normaliser, _ = Normaliser.empty(targets_BT.shape).add(logits_BTV)
    return normaliser.token_loss(_target(logits_BTV, hits_BTV))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def mean_loss(
    head: TiledHead,
    objective: Callable[[TokenLoss], jax.Array],
    chunks: int,
    params: Any,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
) -> tuple[jax.Array, TokenLoss]:
    """The mean over all tokens of `objective(token_loss)`, and the token losses.

    The positions go through the head in `chunks` equal parts, so that only that part of the logits exists at
    a time, and each part tile by tile. Under differentiation a part's gradient is taken as soon as its loss is known,
    from the exponentials that its softmax needs anyway: the mean's cotangent is one number, by which the finished
    gradients are multiplied. The token losses are for metrics: no gradient flows through them.

    Args:
        objective: token losses -> (B, t), the term of each token.
        chunks: a divisor of T.
        params: of the head, not cut.
    """
    tiles = head.cut(params)

    def part(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, TokenLoss]:
        per_token = _scan_losses(head, tiles, *xs, keep=False)[0]
        return objective(per_token), per_token

    terms, per_token = jax.lax.map(part, (_split(chunks, x_BTD), _split(chunks, targets_BT)))
    return terms.mean(), jax.tree.map(_join, per_token)


def _mean_loss_forward(
    head: TiledHead, objective: Any, chunks: int, params: Any, x_BTD: jax.Array, targets_BT: jax.Array
) -> tuple[tuple[jax.Array, TokenLoss], tuple[Any, jax.Array]]:
    tiles = head.cut(params)

    def part(total: Any, xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        per_token, normaliser, kept = _scan_losses(head, tiles, *xs, keep=True)
        value, slopes = _objective_gradient(objective, per_token, targets_BT.size)
        total, dx_BtD = _scan_gradients(head, tiles, *xs, normaliser, kept, slopes, total)
        return total, (value, per_token, dx_BtD)

    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    if chunks == 1:
        total, (value, per_token, dx_BTD) = part(total, (x_BTD, targets_BT))
    else:
        xs = _split(chunks, x_BTD), _split(chunks, targets_BT)
        total, (values, *parts) = jax.lax.scan(part, total, xs)
        value, (per_token, dx_BTD) = values.sum(), jax.tree.map(_join, tuple(parts))
    total = jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)
    return (value, per_token), (total, dx_BTD)


def _mean_loss_backward(
    head: TiledHead, objective: Any, chunks: int, gradients: tuple[Any, jax.Array], cotangents: Any
) -> tuple[Any, jax.Array, None]:
    params, dx_BTD = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients)
    return params, dx_BTD, None


mean_loss.defvjp(_mean_loss_forward, _mean_loss_backward)

_Kept = tuple[jax.Array, jax.Array]  # of all tiles: exponentials (K, B, t, C), the offset they have (K, B, t)


def _scan_losses(
    head: TiledHead, tiles: Any, x_BtD: jax.Array, targets_Bt: jax.Array, *, keep: bool
) -> tuple[TokenLoss, Normaliser, _Kept | None]:
    """The losses of a part of the positions, and what their gradients need."""

    def step(carry: Any, tile: Any) -> tuple[Any, Any]:
        normaliser, target_Bt = carry
        number, params = tile
        logits_BtC = head.logits(params, number, x_BtD)
        normaliser, exps_BtC = normaliser.add(logits_BtC)
        target_Bt += _target(logits_BtC, head.rows(number) == targets_Bt[..., None])
        return (normaliser, target_Bt), (exps_BtC, normaliser.largest) if keep else None

    start = Normaliser.empty(targets_Bt.shape), jnp.zeros(targets_Bt.shape)
    (normaliser, target_Bt), kept = jax.lax.scan(step, start, (jnp.arange(head.tiles), tiles))
    return normaliser.token_loss(target_Bt), normaliser, kept


def _scan_gradients(
    head: TiledHead,
    tiles: Any,
    x_BtD: jax.Array,
    targets_Bt: jax.Array,
    normaliser: Normaliser,
    kept: _Kept | None,
    slopes: tuple[jax.Array, jax.Array],
    total: Any,
) -> tuple[Any, jax.Array]:
    """`total` with the gradients of the tiles' parameters, and the gradient of a part of the positions."""
    softmax_Bt, target_Bt = slopes

    def step(carry: Any, tile: Any) -> tuple[Any, None]:
        total, dx_BtD = carry
        number, params, (exps_BtC, largest_Bt) = tile
        scale_Bt = softmax_Bt * jnp.exp(largest_Bt - normaliser.largest) / normaliser.total
        hits_BtC = head.rows(number) == targets_Bt[..., None]
        dlogits_BtC = exps_BtC * scale_Bt[..., None] - jnp.where(hits_BtC, target_Bt[..., None], 0)
        _, pull = jax.vjp(lambda params, x: head.logits(params, number, x), params, x_BtD)
        dparams, dx = pull(dlogits_BtC)
        return (head.add(total, number, dparams), dx_BtD + dx), None

    start = total, jnp.zeros(x_BtD.shape, jnp.float32)
    (total, dx_BtD), _ = jax.lax.scan(step, start, (jnp.arange(head.tiles), tiles, kept))
    return total, dx_BtD.astype(x_BtD.dtype)


def _objective_gradient(
    objective: Callable[[TokenLoss], jax.Array], per_token: TokenLoss, count: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The part's share of the mean over `count` tokens, and its derivative by the logits: the first of the returned
    slopes times the softmax, minus the second at the target. All three numbers of a token have the softmax as their
    gradient, and the loss has minus one at the target besides.
    """

    def share(nll: jax.Array, log_z: jax.Array, shifted_log_z: jax.Array) -> jax.Array:
        return objective(TokenLoss(nll, log_z, shifted_log_z, per_token.correct)).sum() / count

    value, slopes = jax.value_and_grad(share, (0, 1, 2))(*per_token[:3])
    return value, (sum(slopes), slopes[0])


def _target(logits_BTC: jax.Array, hits_BTC: jax.Array) -> jax.Array:
    """The target's logit as a masked sum, not a gather, so that logits stay sharded over the vocabulary."""
    return jnp.where(hits_BTC, logits_BTC, 0).sum(-1)


def _split(chunks: int, x_BT: jax.Array) -> jax.Array:
    return rearrange(x_BT, "b (c t) ... -> c b t ...", c=chunks)


def _join(x_CBT: jax.Array) -> jax.Array:
    return rearrange(x_CBT, "c b t ... -> b (c t) ...")
