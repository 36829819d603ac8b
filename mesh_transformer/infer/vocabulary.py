"""Log-probabilities of given tokens, a part of the vocabulary at a time: the logits of many positions need never all exist.

Shapes: P positions, M tokens of interest after each, D residual width, V vocabulary rows, C columns of a tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.models import registry
from mesh_transformer.models.base import Model, Params
from mesh_transformer.parallel.sharding import Partition, map_axes

LEAST_COLUMNS = 1024


@dataclasses.dataclass(frozen=True)
class VocabTiles:
    """The vocabulary of a model in `tiles` equal parts; each has an equal share of every tensor-parallel shard's rows.

    A tile's logits are those of a model with so small a vocabulary: the family's own head computes them. The softmax's
    normaliser is summed tile by tile, with the largest logit so far as its offset (Milakov and Gimelshein 2018,
    "Online normalizer calculation for softmax").
    """

    model: Model
    partition: Partition
    tiles: int

    @classmethod
    def of(cls, model: Model, partition: Partition, columns: int) -> VocabTiles:
        """Tiles of about `columns` columns: as many, a power of two, as divide the vocabulary evenly."""
        rows, tiles = model.config.padded_vocab // partition.mesh.shape["tp"], 1
        while rows % (2 * tiles) == 0 and rows // (2 * tiles) >= max(columns, LEAST_COLUMNS):
            tiles *= 2
        return cls(model, partition, tiles)

    @property
    def shards(self) -> int:
        """Parts of the vocabulary on different devices."""
        return self.partition.mesh.shape["tp"]

    @property
    def columns(self) -> int:
        """C, over all shards."""
        return self.model.config.padded_vocab // self.tiles

    def cut(self, head: Params) -> Params:
        """The head's parameters, whole over fsdp, with a first dimension of tiles.

        A parameter without a vocabulary dimension is repeated.
        """
        axes = map_axes(list, self.model.axes["head"])
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

    def log_probs(self, head: Params, x_PD: jax.Array, targets_PM: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Log-probabilities (P, M) of next tokens in nats, float32, and whether no token is likelier.

        Args:
            head: as `cut` gives it.
            x_PD: the residual stream after the last block.
        """
        c = self.model.config
        small = registry.build(c.model_copy(update={"n_vocab": self.columns, "vocab_multiple": 1}))
        tile_PM, column_PM = self._place(targets_PM)
        ids_TC = self._ids()

        def step(carry: Any, tile: Any) -> tuple[Any, None]:
            largest_P1, sum_P1, target_PM = carry
            number, params, ids_C = tile
            logits_PC = small.logits(params, x_PD[:, None])[
                :, 0
            ]  # each position is a sequence: data axes split them
            if c.padded_vocab != c.n_vocab:
                logits_PC = jnp.where(ids_C < c.n_vocab, logits_PC, -jnp.inf)
            new_P1 = jnp.maximum(largest_P1, logits_PC.max(-1, keepdims=True))
            sum_P1 = sum_P1 * jnp.exp(largest_P1 - new_P1) + jnp.exp(logits_PC - new_P1).sum(
                -1, keepdims=True
            )
            found_PM = jnp.take_along_axis(logits_PC, column_PM, axis=-1)
            return (new_P1, sum_P1, jnp.where(tile_PM == number, found_PM, target_PM)), None

        zeros_P1 = jnp.zeros((len(x_PD), 1), jnp.float32)
        start = zeros_P1 - jnp.inf, zeros_P1, jnp.zeros(targets_PM.shape, jnp.float32)
        (largest_P1, sum_P1, target_PM), _ = jax.lax.scan(step, start, (jnp.arange(self.tiles), head, ids_TC))
        return target_PM - largest_P1 - jnp.log(sum_P1), target_PM == largest_P1

    def _ids(self) -> jax.Array:
        """(tiles, C): the token of each column."""
        ids = jnp.arange(self.model.config.padded_vocab)
        return rearrange(ids, "(shards tiles c) -> tiles (shards c)", shards=self.shards, tiles=self.tiles)

    def _place(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The tile of each token, and its column there."""
        width = self.columns // self.shards
        shard, row = jnp.divmod(tokens, self.tiles * width)
        tile, column = jnp.divmod(row, width)
        return tile, shard * width + column
