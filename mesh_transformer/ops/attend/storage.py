"""How a platform writes the arrays of a cache, reads a layer of them, and multiplies the entries by few queries.

Every kind of cache (keys and values, latents, rings) has arrays (L, N, J, S, K) and uses them through `storage()`.

Shapes: L layers, N slots of a cache, B slots of one call, T positions, S positions of a segment, J heads, K dims of a
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from mesh_transformer.parallel.sharding import active, platform
from mesh_transformer.spec import Axes

Segment = tuple[jax.Array, ...]
"""The cache of consecutive positions: one array (L, N, J, S, K) for each `CacheEntry` of the attention."""
Group = tuple[Segment, ...]
"""The segments of layers that hold equally many positions, in the order of the positions."""
# dimensions of an array
SLOT, HEADS, POSITION = 1, 2, 3


def capacity(group: Group) -> int:
    """The positions that a group holds."""
    return sum(segment[0].shape[POSITION] for segment in group)


def axes_of(name: str | None) -> Axes:
    """The names of the dimensions of an array; `name` is the name of the heads."""
    return None, None, name, None, None


class NewEntries(NamedTuple):
    """Entries of a layer, and where a group stores them.

    Args:
        names: of the heads of each entry.
        slots_B: int32; a slot beyond the last is not written.
        positions_BT: int32, consecutive, or consecutive modulo the capacity if that is less than `length`.
        length: positions from here on may be dropped, if the group holds more.
    """

    names: Sequence[str | None]
    layer: jax.Array | int
    slots_B: jax.Array
    positions_BT: jax.Array
    arrays: Sequence[jax.Array]
    length: int


class Storage(Protocol):
    """The operations of a platform on the arrays of a group."""

    copies_slices: ClassVar[bool]
    """Whether XLA copies a slice of an array before it multiplies the slice."""
    late: ClassVar[bool]
    """Whether a step of decoding defers writes: the new entries of all layers are written after the last layer."""
    rows: ClassVar[int]
    """The fewest rows of a product. Missing rows are filled with copies, whose results are not used."""

    def write(self, group: Group, new: NewEntries) -> Group:
        """The group with the entries of one layer, (B, T, J, K) each, stored."""

    def read(
        self, x: jax.Array, name: str | None, layer: jax.Array | int, slots_B: jax.Array | None, size: int
    ) -> jax.Array:
        """The first `size` positions of one layer: (B, J, size, K). `slots_B` None reads all slots."""

    def products(self, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Products of weights, (B, T, J K) each, before they are divided into heads."""


class Scattered:
    """The storage of CPU and GPU: XLA decides how an array lies in memory, and a scatter writes it."""

    copies_slices: ClassVar[bool] = True
    late: ClassVar[bool] = False
    rows: ClassVar[int] = 1

    def write(self, group: Group, new: NewEntries) -> Group:
        """See `Storage`."""
        _, layer, slots_B, positions_BT, arrays, length = new
        # XLA for CPU turns a scatter of one element into slices, for which it copies the cache.
        if positions_BT.size == 1:
            slots_B = jnp.concatenate([slots_B, jnp.full_like(slots_B, group[0][0].shape[SLOT])])
            positions_BT, arrays = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), (positions_BT, tuple(arrays)))
        segments, start = list(group), 0
        for i, segment in enumerate(segments):
            size = segment[0].shape[POSITION]
            if start < length:
                inside = (positions_BT >= start) & (positions_BT < start + size)
                # an index beyond the last position is dropped
                at = jnp.where(inside, positions_BT - start, size)
                where = (layer, slots_B[:, None], slice(None), at)
                segments[i] = tuple(
                    old.at[where].set(x.astype(old.dtype), mode="drop") for old, x in zip(segment, arrays, strict=True)
                )
            start += size
        return tuple(segments)

    def read(
        self, x: jax.Array, name: str | None, layer: jax.Array | int, slots_B: jax.Array | None, size: int
    ) -> jax.Array:
        """See `Storage`."""
        x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, :size]
        return x if slots_B is None else x[slots_B]

    def products(self, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """See `Storage`."""
        return products


class Tiled:
    """The storage of TPUs: positions and K are the two dimensions whose tiles the chip loads.

    libtpu lets the operations choose. The scatter of `Scattered` writes all heads of a position, so that heads and K
    would be tiled. A device's few heads then fill a part of each tile, and to read a layer takes up to 12 times its
    bytes. So each sequence is written by a slice, and the order of the dimensions is fixed (`_pinned`).

    A product of a few rows would be computed without the matrix unit: there are at least 8.
    """

    copies_slices: ClassVar[bool] = False
    late: ClassVar[bool] = True
    rows: ClassVar[int] = 8

    def write(self, group: Group, new: NewEntries) -> Group:
        """See `Storage`."""
        return self.write_layers(group, new._replace(arrays=[x[None] for x in new.arrays]))

    def write_layers(self, group: Group, new: NewEntries) -> Group:
        """`write` for consecutive layers from `new.layer` on: the arrays are (layers, B, T, J, K) each."""
        names, layer, slots_B, positions_BT, arrays, length = new
        ring, several = length > capacity(group), positions_BT.shape[1] > 1
        # a chunk that begins before the end of a ring continues at its start
        laps = (0, capacity(group)) if ring and several else (0,)
        segments, start = [], 0
        for segment in group:
            if start < length:
                written = []
                for old, name, x in zip(segment, names, arrays, strict=True):
                    changed = _pinned(old, name)
                    for lap in laps:
                        starts_B = positions_BT[:, 0] - (start + lap)
                        changed = _placed(changed, layer, slots_B, starts_B, x.astype(old.dtype))
                    written.append(_pinned(changed, name))
                segment = tuple(written)
            segments.append(segment)
            start += segment[0].shape[POSITION]
        return tuple(segments)

    def read(
        self, x: jax.Array, name: str | None, layer: jax.Array | int, slots_B: jax.Array | None, size: int
    ) -> jax.Array:
        """See `Storage`."""
        x = _pinned(x, name)
        if slots_B is None:
            return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, :size]
        shape = (1, 1, x.shape[HEADS], size, x.shape[-1])
        slots = [jax.lax.dynamic_slice(x, (layer, slot, 0, 0, 0), shape)[0] for slot in slots_B]
        return jnp.concatenate(slots)

    def products(self, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """See `Storage`. Without the barrier, libtpu divides the weights into heads, and copies them out of their stack
        for it."""
        return jax.lax.optimization_barrier(tuple(products))


def _placed(
    old: jax.Array, layer: jax.Array | int, slots_B: jax.Array, starts_B: jax.Array, new_LBTJK: jax.Array
) -> jax.Array:
    """The array with T new positions of each sequence, from index `starts_B` on. Indices outside are left out."""
    slots, heads, size, width = old.shape[1:]
    layers, _, length = new_LBTJK.shape[:3]
    count = min(length, size)
    for number, (slot, start) in enumerate(zip(slots_B, starts_B, strict=True)):
        first = jnp.clip(start, 0, size - count)
        place = layer, slot, 0, first, 0
        kept = jax.lax.dynamic_slice(old, place, (layers, 1, heads, count, width))
        # the row of `new` that stands at index `first`
        row = first - start
        rows = row + jnp.arange(count)
        inside = (rows >= 0) & (rows < length) & (slot < slots)
        new = new_LBTJK[:, number : number + 1].swapaxes(2, 3)
        if length > 1:
            padded = jnp.pad(new, [(0, 0)] * 3 + [(count, count), (0, 0)])
            new = jax.lax.dynamic_slice_in_dim(padded, row + count, count, axis=3)
        old = jax.lax.dynamic_update_slice(old, jnp.where(inside[:, None], new, kept), place)
    return old


def _pinned(x: jax.Array, name: str | None) -> jax.Array:
    """The array, whose dimensions lie in memory in their order.

    The constraint stands in a `shard_map`: the partitioner would gather the heads for it.
    """

    def fix(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    partition = active()
    if partition is None:
        return fix(x)
    spec = partition.spec(axes_of(name))
    return jax.shard_map(fix, mesh=partition.current_mesh, in_specs=spec, out_specs=spec, check_vma=False)(x)


_STORAGES: dict[str, Storage] = {"tpu": Tiled()}


def storage() -> Storage:
    """The storage of the platform for which code is traced now."""
    return _STORAGES.get(platform(), Scattered())


def with_copies(x: jax.Array, axis: int) -> jax.Array:
    """The array with its rows along an axis repeated as a whole, until a product has the fewest that it needs."""
    times = -(-storage().rows // x.shape[axis])
    if times == 1:
        return x
    # without the barrier, XLA computes the product of one copy
    return jax.lax.optimization_barrier(jnp.concatenate([x] * times, axis=axis))
