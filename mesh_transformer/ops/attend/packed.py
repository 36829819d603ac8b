"""Attention within rows that hold many sequences. A prefix that several sequences share is stored once.

Shapes: B rows, T tokens of a row, H heads, K dims of a head.

A row holds trees of tokens. A path from the root of a tree to a leaf is a sequence, such as the context of a question
and one of its answers. Tokens stand in preorder: token t and its descendants are the row's indices t .. end - 1, and
these are the tokens that see t.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.ops.attend.cached import Entries
from mesh_transformer.ops.attend.causal import sees


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ends_BT", "groups"], meta_fields=["group_of"])
@dataclasses.dataclass(frozen=True)
class PackedView:
    """A `cached.KeyValueView` of the rows themselves, without earlier positions. `ends_BT` says which tokens see
    which."""

    latent: ClassVar[bool] = False
    triangular: ClassVar[bool] = True
    separate: ClassVar[bool] = False
    ends_BT: jax.Array  # int32: the row's index after the last token that sees this one; more than its own
    # keys and values of the layer that was written last, for each group of layers with equal entries
    groups: tuple[tuple[jax.Array, ...], ...]
    # the group of each layer
    group_of: tuple[int, ...]

    @classmethod
    def of(cls, ends_BT: jax.Array, entries: Sequence[Entries], dtype: jnp.dtype) -> PackedView:
        """A view without keys and values yet, given the entries of each layer."""
        distinct = list(dict.fromkeys(entries))
        groups = tuple(
            tuple(jnp.zeros((*ends_BT.shape, e.heads, e.width), dtype) for e in layer_entries)
            for layer_entries in distinct
        )
        return cls(ends_BT, groups, tuple(map(distinct.index, entries)))

    def update(
        self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array
    ) -> tuple[PackedView, list[tuple[jax.Array, ...]]]:
        """Replace the keys and values of the previous layer. Returns the view, and the new ones as one part."""
        return dataclasses.replace(self, groups=(new,)), [tuple(rearrange(x, "b t h k -> b h t k") for x in new)]

    def mask(self, positions_BT: jax.Array, window: jax.Array | int | None) -> jax.Array:
        """(B, 1, T, T) booleans: the tokens of the row that each token sees.

        A window counts positions of a sequence, not indices of the row: tokens of other sequences stand between.
        """
        index = jnp.arange(self.ends_BT.shape[1])
        keys, queries = index[None, None], index[None, :, None]
        seen = (keys <= queries) & (queries < self.ends_BT[:, None])
        return (seen if window is None else seen & sees(positions_BT, positions_BT, window))[:, None]

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """(B, T): the positions of the tokens themselves."""
        return positions_BT

    def split(self, layers: int) -> tuple[list[PackedView], Sequence[int]]:
        """See `cached.KeyValueView`: a view for each group."""
        return [dataclasses.replace(self, groups=(group,)) for group in self.groups], self.group_of

    def joined(self, views: Sequence[PackedView]) -> PackedView:
        """See `cached.KeyValueView`."""
        return dataclasses.replace(self, groups=tuple(view.groups[0] for view in views))
