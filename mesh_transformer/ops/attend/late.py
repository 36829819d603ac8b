"""A view of the cache for one new position of each sequence, which joins the cache after the last layer.

Each operation of a TPU takes more than a microsecond. To write each slot in each layer would take longer than the
products of attention, so the new entries of all layers are written once, at the end. In a layer, a query attends to the
cache before the write and to its own position.

Shapes: as in `ops.attend.storage`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.ops.attend.cached import CacheView
from mesh_transformer.ops.attend.storage import NewEntries, Segment, Tiled
from mesh_transformer.spec import CacheEntry


@functools.partial(jax.tree_util.register_dataclass, data_fields=["before", "positions_B", "groups"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class DeferredWriteView:
    """A `KeyValueView` of the positions up to `positions_B`: the cache `before` them, and their new entries.

    All rows of a call for a sequence are at its new position: they are copies.
    """

    latent: ClassVar[bool] = True
    triangular: ClassVar[bool] = False
    separate: ClassVar[bool] = True
    before: CacheView
    # int32: the new position of each sequence
    positions_B: jax.Array
    # the entries of the new positions, for each group: (L, B, 1, J, K) each
    groups: tuple[Segment, ...]

    @classmethod
    def of(cls, before: CacheView, positions_B: jax.Array) -> DeferredWriteView:
        """A view without the new entries yet."""

        def empty(x: jax.Array, entry: CacheEntry) -> jax.Array:
            return jnp.zeros((len(x), len(positions_B), 1, entry.heads, entry.width), x.dtype)

        cache = before.cache
        groups = tuple(
            tuple(map(empty, group[0], entries)) for group, entries in zip(cache.groups, cache.entries, strict=True)
        )
        return cls(before, positions_B, groups)

    def update(
        self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array
    ) -> tuple[DeferredWriteView, list[Segment]]:
        """See `KeyValueView`. The new position is the last part."""
        (group,) = self.groups
        entries = [x[:, :1].astype(old.dtype) for x, old in zip(new, group, strict=True)]
        kept = (jax.lax.dynamic_update_index_in_dim(old, x, layer, 0) for old, x in zip(group, entries, strict=True))
        part = tuple(rearrange(x, "b t j k -> b j t k") for x in entries)
        return dataclasses.replace(self, groups=(tuple(kept),)), [*self.before.read(layer), part]

    def mask(self, positions_BT: jax.Array, window: jax.Array | int | None) -> jax.Array:
        """See `KeyValueView`. The entry of the cache at the new position, or at its place in a ring, is an old one."""
        seen = self.before.mask(positions_BT, window)
        own_BT1 = (positions_BT % self.before.capacity)[..., None]
        seen = seen & (jnp.arange(seen.shape[-1])[None, None] != own_BT1)[:, None]
        return jnp.concatenate([seen, jnp.ones_like(seen[..., :1])], axis=-1)

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """See `KeyValueView`."""
        before = self.before.key_positions(positions_BT)
        own_B1 = self.positions_B[:, None]
        return jnp.concatenate([jnp.broadcast_to(before, (len(own_B1), before.shape[1])), own_B1], axis=1)

    def split(self, layers: int) -> tuple[list[DeferredWriteView], Sequence[int]]:
        """See `KeyValueView`: a view of each group."""
        views, view_of = self.before.split(layers)
        each = zip(views, self.groups, strict=True)
        return [dataclasses.replace(self, before=view, groups=(group,)) for view, group in each], view_of

    def joined(self, views: Sequence[DeferredWriteView]) -> CacheView:
        """The cache with the new entries."""
        return self.before.joined([view.written() for view in views])

    def written(self) -> CacheView:
        """The cache of one group with the new entries."""
        before, (new,) = self.before, self.groups
        (group,) = before.cache.groups
        positions_B1 = self.positions_B[:, None]
        if before.length > before.capacity:
            positions_B1 = positions_B1 % before.capacity
        entries = NewEntries(before.entries, 0, before.written_B, positions_B1, new, before.length)
        written = Tiled().write_layers(group, entries)
        return dataclasses.replace(before, cache=dataclasses.replace(before.cache, groups=(written,)))
