"""The vocabulary of a model in equal parts, so that the logits of many positions need never all exist, or fit a cache.

Shapes: B sequences, T positions, D residual width, K tiles of C vocabulary rows.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.models.model import Model, Params
from mesh_transformer.parallel.sharding import Partition, map_axes

LEAST_COLUMNS = 1024


@dataclasses.dataclass(frozen=True, eq=False)
class VocabTiles:
    """The last matrix of a model in `tiles` parts: an `ops.loss.TiledHead`.

    Each has an equal share of every tensor-parallel shard's rows. A tile's logits are those of a model with so small a
    vocabulary: the family's own head computes them.
    """

    model: Model
    partition: Partition
    tiles: int

    @classmethod
    def of(cls, model: Model, partition: Partition, columns: int) -> VocabTiles:
        """Tiles of about `columns` columns: as many, a power of two, as divide the vocabulary evenly."""
        rows, tiles = model.decoder.padded_vocab // partition.size("vocab"), 1
        while rows % (2 * tiles) == 0 and rows // (2 * tiles) >= max(columns, LEAST_COLUMNS):
            tiles *= 2
        return cls(model, partition, tiles)

    @property
    def shards(self) -> int:
        """Parts of the vocabulary on different devices."""
        return self.partition.size("vocab")

    @property
    def columns(self) -> int:
        """C, over all shards."""
        return self.model.decoder.padded_vocab // self.tiles

    def cut(self, head: Params) -> Params:
        """The head's parameters, whole over fsdp, with a first dimension of tiles.

        A parameter without a vocabulary dimension is repeated.
        """
        if self.tiles == 1:
            return jax.tree.map(lambda leaf: leaf[None], head)
        axes = map_axes(list, self.model.stage_axes["head"])
        return jax.tree.map(self._cut, head, axes, is_leaf=lambda node: isinstance(node, list))

    def _cut(self, leaf: jax.Array, axes: list[str | None]) -> jax.Array:
        if "vocab" not in axes:
            return jnp.broadcast_to(leaf, (self.tiles, *leaf.shape))
        dim = axes.index("vocab")
        shape = (*leaf.shape[:dim], self.shards, self.tiles, -1, *leaf.shape[dim + 1 :])
        tiles = jnp.moveaxis(leaf.reshape(shape), dim + 1, 0)
        tiles = tiles.reshape(self.tiles, *leaf.shape[:dim], self.columns, *leaf.shape[dim + 1 :])
        names = (None if name == "embed" else name for name in axes)
        return jax.lax.with_sharding_constraint(tiles, self.partition.sharding(None, *names))

    def add(self, total: Params, number: jax.Array, gradients: Params) -> Params:
        """`total`, like the head's parameters, with the gradients of tile `number` added in place."""
        axes = map_axes(list, self.model.stage_axes["head"])
        add = functools.partial(self._add, number)
        return jax.tree.map(add, total, gradients, axes, is_leaf=lambda node: isinstance(node, list))

    def _add(
        self, number: jax.Array, total: jax.Array, gradient: jax.Array, axes: list[str | None]
    ) -> jax.Array:
        if self.tiles == 1 or "vocab" not in axes:
            return total + gradient
        dim = axes.index("vocab")
        before, after = total.shape[:dim], total.shape[dim + 1 :]
        view = total.reshape(*before, self.shards, self.tiles, -1, *after)
        old = jax.lax.dynamic_index_in_dim(view, number, dim + 1, keepdims=False)
        new = old + gradient.reshape(old.shape)
        return jax.lax.dynamic_update_index_in_dim(view, new, number, dim + 1).reshape(total.shape)

    def logits(self, params: Params, number: jax.Array, y_BTD: jax.Array) -> jax.Array:
        """(B, T, C) float32 logits of tile `number`, of what the final norm gave; -inf in rows that are no token's."""
        c = self.model.decoder
        logits_BTC = self._small.unembed(params, y_BTD)
        if c.padded_vocab == c.n_vocab:
            return logits_BTC
        return jnp.where(self.rows(number) < c.n_vocab, logits_BTC, -jnp.inf)

    def rows(self, number: jax.Array) -> jax.Array:
        """(C,): the tokens of a tile."""
        width = self.columns // self.shards
        starts = jnp.arange(self.shards) * self.tiles * width + number * width
        return rearrange(starts[:, None] + jnp.arange(width), "shards row -> (shards row)")

    def place(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tile of each token, and its column there."""
        width = self.columns // self.shards
        shard, row = jnp.divmod(tokens, self.tiles * width)
        tile, column = jnp.divmod(row, width)
        return tile, shard * width + column

    @functools.cached_property
    def _small(self) -> Model:
        decoder = dataclasses.replace(self.model.decoder, n_vocab=self.columns, vocab_multiple=1)
        return dataclasses.replace(self.model, decoder=decoder)
