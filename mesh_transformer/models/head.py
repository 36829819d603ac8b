"""The unembedding matrix in tiles of the vocabulary, and the cross-entropy that is computed tile by tile.

The logits of all positions and tokens never exist at once: devices may split the vocabulary, one tile of it is computed
at a time, and the logits of a tile fit a processor's caches.

Shapes: B sequences, T positions, D residual width, V vocabulary rows, K tiles of C rows each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.models.model import Model
from mesh_transformer.parallel.sharding import Axes, Params, Partition

# The least number of columns that a tile has in each shard.
LEAST_COLUMNS = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class VocabTiles:
    """The unembedding matrix of a model in `tiles` tiles.

    Each tile has an equal share of the rows of every tensor-parallel shard. The family's own head computes the logits
    of a tile, as it computes the logits of a model with a vocabulary of C rows.
    """

    model: Model
    partition: Partition
    tiles: int

    @classmethod
    def of(cls, model: Model, partition: Partition, columns: int) -> VocabTiles:
        """Tiles of at least `columns` columns in each shard; their number is a power of two that divides a shard's
        rows."""
        rows, tiles = model.decoder.padded_vocab // partition.size("vocab"), 1
        while rows % (2 * tiles) == 0 and rows // (2 * tiles) >= max(columns, LEAST_COLUMNS):
            tiles *= 2
        return cls(model, partition, tiles)

    @property
    def shards(self) -> int:
        """Number of devices that split the vocabulary."""
        return self.partition.size("vocab")

    @property
    def position_shards(self) -> int:
        """Number of devices that split the positions."""
        return self.partition.size("seq")

    @property
    def columns(self) -> int:
        """C, over all shards."""
        return self.model.decoder.padded_vocab // self.tiles

    def tile(self, head: Params, number: jax.Array) -> Params:
        """The parameters of tile `number`, from the head's parameters, gathered over fsdp."""
        if self.tiles == 1:
            return head
        return jax.tree.map(functools.partial(self._tile, number), head, self.model.stage_axes["head"])

    def _tile(self, number: jax.Array, leaf: jax.Array, axes: Axes) -> jax.Array:
        if "vocab" not in axes:
            return leaf
        dim = axes.index("vocab")
        rows = jax.lax.dynamic_index_in_dim(self._by_tile(leaf, dim), number, dim + 1, keepdims=False)
        return rows.reshape(*leaf.shape[:dim], self.columns, *leaf.shape[dim + 1 :])

    def cut(self, head: Params) -> Params:
        """The head's parameters, gathered over fsdp, with a leading dimension K.

        A parameter without a vocabulary dimension is repeated for each tile.
        """
        if self.tiles == 1:
            return jax.tree.map(lambda leaf: leaf[None], head)
        return jax.tree.map(self._cut, head, self.model.stage_axes["head"])

    def _cut(self, leaf: jax.Array, axes: Axes) -> jax.Array:
        if "vocab" not in axes:
            return jnp.broadcast_to(leaf, (self.tiles, *leaf.shape))
        dim = axes.index("vocab")
        tiles = jnp.moveaxis(self._by_tile(leaf, dim), dim + 1, 0)
        tiles = tiles.reshape(self.tiles, *leaf.shape[:dim], self.columns, *leaf.shape[dim + 1 :])
        names = (None if name == "embed" else name for name in axes)
        return jax.lax.with_sharding_constraint(tiles, self.partition.sharding(None, *names))

    def add(self, total: Params, number: jax.Array, gradients: Params) -> Params:
        """`total`, a tree like the head's parameters, plus the gradients of tile `number`, in place."""
        add = functools.partial(self._add, number)
        return jax.tree.map(add, total, gradients, self.model.stage_axes["head"])

    def _add(self, number: jax.Array, total: jax.Array, gradient: jax.Array, axes: Axes) -> jax.Array:
        gradient = gradient.astype(total.dtype)
        if self.tiles == 1 or "vocab" not in axes:
            return total + gradient
        dim = axes.index("vocab")
        view = self._by_tile(total, dim)
        old = jax.lax.dynamic_index_in_dim(view, number, dim + 1, keepdims=False)
        new = old + gradient.reshape(old.shape)
        return jax.lax.dynamic_update_index_in_dim(view, new, number, dim + 1).reshape(total.shape)

    def _by_tile(self, x: jax.Array, dim: int) -> jax.Array:
        """x with its vocabulary, dimension `dim`, reshaped to (shards, tiles, rows)."""
        return x.reshape(*x.shape[:dim], self.shards, self.tiles, -1, *x.shape[dim + 1 :])

    def logits(self, params: Params, number: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """(B, T, C) float32 logits of tile `number`, from the final norm's output; -inf in the vocabulary's padding."""
        d, logits_BTC = self.model.decoder, self._small.unembed(params, y_BTD)
        if d.padded_vocab == d.n_vocab:
            return logits_BTC
        return jnp.where(self.rows(number)[None, None] < d.n_vocab, logits_BTC, -jnp.inf)

    def rows(self, number: jax.Array) -> jax.Array:
        """(C,) int32: the token ids of a tile."""
        width = self.columns // self.shards
        starts = jnp.arange(self.shards) * self.tiles * width + number * width
        return rearrange(starts[:, None] + jnp.arange(width)[None], "shards row -> (shards row)")

    def place(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tile of each token id, and its column in that tile."""
        width = self.columns // self.shards
        shard, row = jnp.divmod(tokens, self.tiles * width)
        tile, column = jnp.divmod(row, width)
        return tile, shard * width + column

    @functools.cached_property
    def _small(self) -> Model:
        decoder = dataclasses.replace(self.model.decoder, n_vocab=self.columns, vocab_multiple=1)
        return dataclasses.replace(self.model, decoder=decoder)


class TokenLoss(NamedTuple):
    """Per-token results, each (B, T)."""

    # float32, nats
    nll: jax.Array
    # float32: log of the softmax's normalizer
    log_z: jax.Array
    # float32: log_z minus the largest logit, as in the classic z-loss
    shifted_log_z: jax.Array
    # bool: the target has the largest logit
    correct: jax.Array


Objective = Callable[[TokenLoss], jax.Array]
"""The losses of tokens -> the term of each in the sum."""
_Gradients = tuple[Params, jax.Array]
"""The gradients of the head's parameters, and of x."""


class Normalizer(NamedTuple):
    """The softmax's normalizer of each position, summed tile by tile relative to the largest logit so far.

    Milakov and Gimelshein 2018, "Online normalizer calculation for softmax".
    """

    # float32: the largest logit so far
    largest: jax.Array
    # float32: sum of exp(logit - largest)
    total: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> Normalizer:
        """The normalizer of no logits."""
        return cls(jnp.full(shape, -jnp.inf), jnp.zeros(shape))

    def add(self, logits_C: jax.Array) -> tuple[Normalizer, jax.Array]:
        """Add (..., C) logits; return the normalizer and exp(logit - largest) of these. One logit so far must be
        finite."""
        largest = jnp.maximum(self.largest, jax.lax.stop_gradient(logits_C.max(-1)))
        exps_C = jnp.exp(logits_C - largest[..., None])
        return Normalizer(largest, self.total * jnp.exp(self.largest - largest) + exps_C.sum(-1)), exps_C

    def token_loss(self, target: jax.Array) -> TokenLoss:
        """The losses of tokens whose logits are `target`."""
        shifted, log_total = target - self.largest, jnp.log(self.total)
        return TokenLoss(log_total - shifted, log_total + self.largest, log_total, shifted == 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def weighted_loss(
    head: VocabTiles,
    objective: Objective,
    chunks: int,
    params: Params,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> tuple[jax.Array, TokenLoss]:
    """The sum over all tokens of their weight times `objective(token_loss)`, and the token losses.

    The positions are computed in `chunks` equal parts, and each part tile by tile, so that only a part of the logits
    exists at a time. Under differentiation the forward pass also computes the gradients, from the exponentials of the
    softmax; the backward pass multiplies them by the cotangent of the sum, a scalar. The token losses are for metrics:
    they and the weights have no gradient.

    With L = objective(nll, log_z, shifted_log_z), p = softmax(z) and z the logits:
    dL/dz = (L_nll + L_log_z + L_shifted) p - L_nll onehot(target).

    Args:
        objective: token losses -> (B, t), the term of each token.
        chunks: a divisor of the positions of a device.
        params: of the head, not in tiles.
        weights_BT: float32.
    """

    def part(xs: tuple[jax.Array, ...]) -> tuple[jax.Array, TokenLoss]:
        x_BtD, targets_Bt, weights_Bt = xs
        per_token = _scan_losses(head, params, x_BtD, targets_Bt, keep=False)[0]
        return objective(per_token) * weights_Bt, per_token

    terms, per_token = jax.lax.map(part, tuple(_split(head, chunks, x) for x in (x_BTD, targets_BT, weights_BT)))
    return terms.sum(), jax.tree.map(functools.partial(_join, head), per_token)


def _weighted_loss_forward(
    head: VocabTiles,
    objective: Objective,
    chunks: int,
    params: Params,
    x_BTD: jax.Array,
    targets_BT: jax.Array,
    weights_BT: jax.Array,
) -> tuple[tuple[jax.Array, TokenLoss], _Gradients]:
    def part(total: Params, xs: tuple[jax.Array, ...]) -> tuple[Params, tuple[jax.Array, TokenLoss, jax.Array]]:
        x_BtD, targets_Bt, weights_Bt = xs
        per_token, normalizer, kept = _scan_losses(head, params, x_BtD, targets_Bt, keep=True)
        assert kept is not None
        value, loss_derivatives = _objective_gradient(objective, per_token, weights_Bt)
        total, dx_BtD = _scan_gradients(head, params, x_BtD, targets_Bt, normalizer, kept, loss_derivatives, total)
        return total, (value, per_token, dx_BtD)

    total = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    if chunks == 1:
        total, (value, per_token, dx_BTD) = part(total, (x_BTD, targets_BT, weights_BT))
    else:
        xs = tuple(_split(head, chunks, x) for x in (x_BTD, targets_BT, weights_BT))
        total, (values, *parts) = jax.lax.scan(part, total, xs)
        value, (per_token, dx_BTD) = values.sum(), jax.tree.map(functools.partial(_join, head), tuple(parts))
    total = jax.tree.map(lambda t, p: t.astype(p.dtype), total, params)
    return (value, per_token), (total, dx_BTD)


def _weighted_loss_backward(
    head: VocabTiles, objective: Objective, chunks: int, gradients: _Gradients, cotangents: tuple[jax.Array, TokenLoss]
) -> tuple[Params, jax.Array, None, None]:
    params, dx_BTD = jax.tree.map(lambda g: g * cotangents[0].astype(g.dtype), gradients)
    return params, dx_BTD, None, None


weighted_loss.defvjp(_weighted_loss_forward, _weighted_loss_backward)

_Kept = tuple[jax.Array, jax.Array]
"""For all tiles: exponentials (K, B, t, C), and the logit that was subtracted in them (K, B, t)."""
_Progress = tuple[Normalizer, jax.Array]
"""For the tiles so far: the normalizer, and the logits of the targets (B, t)."""


def _scan_losses(
    head: VocabTiles, params: Params, x_BtD: jax.Array, targets_Bt: jax.Array, *, keep: bool
) -> tuple[TokenLoss, Normalizer, _Kept | None]:
    """The losses of a part of the positions; their normalizer; with `keep`, the exponentials that the gradients
    need."""

    def step(carry: _Progress, number: jax.Array) -> tuple[_Progress, _Kept | None]:
        normalizer, target_Bt = carry
        logits_BtC = head.logits(head.tile(params, number), number, x_BtD)
        normalizer, exps_BtC = normalizer.add(logits_BtC)
        hits_BtC = head.rows(number)[None, None] == targets_Bt[..., None]
        # A masked sum, not a gather: the logits stay sharded over the vocabulary.
        target_Bt += jnp.where(hits_BtC, logits_BtC, 0).sum(-1)
        return (normalizer, target_Bt), (exps_BtC, normalizer.largest) if keep else None

    start = Normalizer.empty(targets_Bt.shape), jnp.zeros(targets_Bt.shape)
    (normalizer, target_Bt), kept = jax.lax.scan(step, start, jnp.arange(head.tiles))
    return normalizer.token_loss(target_Bt), normalizer, kept


def _scan_gradients(
    head: VocabTiles,
    params: Params,
    x_BtD: jax.Array,
    targets_Bt: jax.Array,
    normalizer: Normalizer,
    kept: _Kept,
    loss_derivatives: tuple[jax.Array, jax.Array],
    total: Params,
) -> _Gradients:
    """`total` plus the gradients of the parameters, and the gradient of `x_BtD`."""
    softmax_Bt, target_Bt = loss_derivatives

    def step(carry: _Gradients, tile: tuple[jax.Array, _Kept]) -> tuple[_Gradients, None]:
        total, dx_BtD = carry
        number, (exps_BtC, largest_Bt) = tile
        scale_Bt = softmax_Bt * jnp.exp(largest_Bt - normalizer.largest) / normalizer.total
        hits_BtC = head.rows(number)[None, None] == targets_Bt[..., None]
        dlogits_BtC = exps_BtC * scale_Bt[..., None] - jnp.where(hits_BtC, target_Bt[..., None], 0)
        _, pull = jax.vjp(lambda params, x: head.logits(params, number, x), head.tile(params, number), x_BtD)
        dparams, dx = pull(dlogits_BtC)
        return (head.add(total, number, dparams), dx_BtD + dx.astype(dx_BtD.dtype)), None

    start = total, jnp.zeros(x_BtD.shape, jnp.float32)
    (total, dx_BtD), _ = jax.lax.scan(step, start, (jnp.arange(head.tiles), kept))
    return total, dx_BtD.astype(x_BtD.dtype)


def _objective_gradient(
    objective: Objective, per_token: TokenLoss, weights_Bt: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A part's share of the sum; and a, b such that its derivative by the logits is a softmax - b onehot(target).

    The derivative of log_z and of shifted_log_z is the softmax; the derivative of nll is softmax - onehot(target).
    (shifted_log_z is differentiated with its offset, the largest logit, held constant.)
    """

    def share(nll: jax.Array, log_z: jax.Array, shifted_log_z: jax.Array) -> jax.Array:
        return (objective(TokenLoss(nll, log_z, shifted_log_z, per_token.correct)) * weights_Bt).sum()

    value, loss_derivatives = jax.value_and_grad(share, (0, 1, 2))(*per_token[:3])
    return value, (sum(loss_derivatives), loss_derivatives[0])


def _split(head: VocabTiles, chunks: int, x_BT: jax.Array) -> jax.Array:
    """(B, T, ...) in equal parts of the positions, each with some positions of every device: (chunks, B, t, ...)."""
    return rearrange(x_BT, "b (s c t) ... -> c b (s t) ...", s=head.position_shards, c=chunks)


def _join(head: VocabTiles, x_CBT: jax.Array) -> jax.Array:
    return rearrange(x_CBT, "c b (s t) ... -> b (s c t) ...", s=head.position_shards)
