"""Attention over rows that hold many sequences side by side, with what they share held once.

Shapes: B rows, T tokens of a row, H heads, K dims of a head.

A row holds trees of tokens. A branch of a tree, from its root to a leaf, is a sequence: a question's context, say, and
one of the answers. Tokens stand in preorder, so that the tokens below one are those that directly follow it: token t and
everything below it are the row's indices t .. end - 1, and these are the tokens that see t.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.families.spec import CacheEntry
from mesh_transformer.ops.attend.causal import sees


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedView:
    """What a model sees in place of a cache: nothing from before, and which of the row's own tokens see which.

    See `cached.KeyValueView`.
    """

    triangular: ClassVar[bool] = True
    ends_BT: jax.Array  # int32: the row's index after the last token that sees this one; more than its own
    kept: tuple[jax.Array, ...]  # (B, T, H, K), of the layer that was written last

    @classmethod
    def of(cls, ends_BT: jax.Array, entries: Sequence[CacheEntry], dtype: jnp.dtype) -> PackedView:
        """The view of a call that is about to begin."""
        return cls(ends_BT, tuple(jnp.zeros((*ends_BT.shape, e.heads, e.width), dtype) for e in entries))

    def write(self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array) -> PackedView:
        """Hold the keys and values of one layer, until those of the next."""
        return dataclasses.replace(self, kept=new)

    def read(self, layer: jax.Array | int) -> list[tuple[jax.Array, ...]]:
        """The row's own keys and values, in one part."""
        return [tuple(rearrange(x, "b t h k -> b h t k") for x in self.kept)]

    def mask(self, positions_BT: jax.Array, window: int | None) -> jax.Array:
        """(B, 1, T, T) booleans: the tokens of the row that each token sees.

        A window counts positions: in the row, tokens of other branches stand between those of one.
        """
        index = jnp.arange(self.ends_BT.shape[1])
        seen = (index <= index[:, None]) & (index[:, None] < self.ends_BT[:, None])
        return (seen & sees(positions_BT, positions_BT, window))[:, None] if window else seen[:, None]

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """(B, T): the tokens' own."""
        return positions_BT

    def layers(self, count: int) -> list[PackedView]:
        """See `cached.KeyValueView`."""
        return [self] * count

    def with_layers(self, views: Sequence[PackedView]) -> PackedView:
        """See `cached.KeyValueView`."""
        return views[-1]
