"""How a platform writes the arrays of a cache, reads a layer of them, and multiplies the entries by few queries.

Every kind of cache (keys and values, latents, rings) has an array for each of its entries and uses them through
`storage()`, which decides the order of an array's dimensions: (L, N, J, S, K) or (L, N, J, K, S).

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
from mesh_transformer.spec import Axes, CacheEntry

Segment = tuple[jax.Array, ...]
"""The cache of consecutive positions: one array for each `CacheEntry` of the attention."""
Group = tuple[Segment, ...]
"""The segments of layers that hold equally many positions, in the order of the positions."""
# dimensions of an array
SLOT, HEADS = 1, 2
# columns of a tile of a TPU's memory
LANES = 128


def zeros(entry: CacheEntry, layers: int, slots: int, positions: int, dtype: jnp.dtype) -> jax.Array:
    """An array for the entries of so many positions."""
    turned = storage().position_axis(entry) == 4
    last = (entry.width, positions) if turned else (positions, entry.width)
    return jnp.zeros((layers, slots, entry.heads, *last), dtype)


def positions(segment: Segment, entries: Sequence[CacheEntry]) -> int:
    """The positions of a segment."""
    return segment[0].shape[storage().position_axis(entries[0])]


def capacity(group: Group, entries: Sequence[CacheEntry]) -> int:
    """The positions that a group holds."""
    return sum(positions(segment, entries) for segment in group)


def axes_of(name: str | None) -> Axes:
    """The names of the dimensions of an array; `name` is the name of the heads."""
    return None, None, name, None, None


class NewEntries(NamedTuple):
    """Entries of a layer, and where a group stores them.

    Args:
        entries: the kinds of entries, in the order of `arrays`.
        slots_B: int32; a slot beyond the last is not written.
        positions_BT: int32, consecutive, or consecutive modulo the capacity if that is less than `length`.
        length: positions from here on may be dropped, if the group holds more.
    """

    entries: Sequence[CacheEntry]
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
    block: ClassVar[int | None]
    """Positions that attention reads at a time, in a loop that ends with the last one that a call needs. None: a
    program reads a fixed number of positions."""
    rows: ClassVar[int]
    """The fewest rows of a product. Missing rows are filled with copies, whose results are not used."""

    def position_axis(self, entry: CacheEntry) -> int:
        """The dimension of an array that counts the positions: 3 or 4. The other one is K."""

    def write(self, group: Group, new: NewEntries) -> Group:
        """The group with the entries of one layer, (B, T, J, K) each, stored."""

    def read(
        self, x: jax.Array, entry: CacheEntry, layer: jax.Array | int, slots_B: jax.Array | None, size: int
    ) -> jax.Array:
        """The first `size` positions of one layer: (B, J, size, K). `slots_B` None reads all slots."""

    def products(self, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Products of weights, (B, T, J K) each, before they are divided into heads."""


class Scattered:
    """The storage of GPUs: XLA decides how an array lies in memory, and a scatter writes it."""

    copies_slices: ClassVar[bool] = True
    late: ClassVar[bool] = False
    block: ClassVar[int | None] = None
    rows: ClassVar[int] = 1

    def position_axis(self, entry: CacheEntry) -> int:
        """See `Storage`."""
        return 3

    def write(self, group: Group, new: NewEntries) -> Group:
        """See `Storage`."""
        _, layer, slots_B, positions_BT, arrays, length = new
        # XLA for CPU turns a scatter of one element into slices, for which it copies the cache.
        if positions_BT.size == 1:
            slots_B = jnp.concatenate([slots_B, jnp.full_like(slots_B, group[0][0].shape[SLOT])])
            positions_BT, arrays = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), (positions_BT, tuple(arrays)))
        segments, start = list(group), 0
        for i, segment in enumerate(segments):
            size = positions(segment, new.entries)
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
        self, x: jax.Array, entry: CacheEntry, layer: jax.Array | int, slots_B: jax.Array | None, size: int
    ) -> jax.Array:
        """See `Storage`."""
        x = jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, :size]
        return x if slots_B is None else x[slots_B]

    def products(self, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """See `Storage`."""
        return products


class Looped(Scattered):
    """The storage of CPUs: one program reads as many positions as a call needs, block by block, instead of a program
    for each of several lengths. A block and its logits stay in the processor's cache."""

    copies_slices: ClassVar[bool] = False
    block: ClassVar[int | None] = 256


class Tiled:
    """The storage of TPUs: positions and K are the two dimensions whose tiles of 8 x 128 the chip loads.

    libtpu lets the operations choose. The scatter of `Scattered` writes all heads of a position, so that heads and K
    would be tiled. A device's few heads then fill a part of each tile, and to read a layer takes up to 12 times its
    bytes. So each sequence is written by a slice, and the order of the dimensions is fixed (`_pinned`). The last one is
    positions where K does not fill whole tiles, such as 64: else every tile would have columns without numbers, and
    libtpu would copy the cache into the other order at the start of a call and back at its end.

    A product of a few rows would be computed without the matrix unit: there are at least 8.
    """

    copies_slices: ClassVar[bool] = False
    late: ClassVar[bool] = True
    block: ClassVar[int | None] = None
    rows: ClassVar[int] = 8

    def position_axis(self, entry: CacheEntry) -> int:
        """See `Storage`."""
        return 4 if entry.width % LANES else 3

    def write(self, group: Group, new: NewEntries) -> Group:
        """See `Storage`."""
        return self.write_layers(group, new._replace(arrays=[x[None] for x in new.arrays]))

    def write_layers(self, group: Group, new: NewEntries) -> Group:
        """`write` for consecutive layers from `new.layer` on: the arrays are (layers, B, T, J, K) each."""
        entries, layer, slots_B, positions_BT, arrays, length = new
        held = capacity(group, entries)
        # a chunk that begins before the end of a ring continues at its start
        laps = (0, held) if length > held and positions_BT.shape[1] > 1 else (0,)
        segments, start = [], 0
        for segment in group:
            if start < length:
                written = []
                for old, entry, x in zip(segment, entries, arrays, strict=True):
                    changed = _pinned(old, entry.name)
                    for lap in laps:
                        starts_B = positions_BT[:, 0] - (start + lap)
                        axis = self.position_axis(entry)
                        changed = _placed(changed, axis, layer, slots_B, starts_B, x.astype(old.dtype))
                    written.append(_pinned(changed, entry.name))
                segment = tuple(written)
            segments.append(segment)
            start += positions(segment, entries)
        return tuple(segments)

    def read(
        self, x: jax.Array, entry: CacheEntry, layer: jax.Array | int, slots_B: jax.Array | None, size: int
    ) -> jax.Array:
        """See `Storage`."""
        axis = self.position_axis(entry)
        x = _pinned(x, entry.name)
        if slots_B is None:
            read = jax.lax.slice_in_dim(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), 0, size, axis=axis - 1)
        else:
            sizes = [1, 1, *x.shape[HEADS:]]
            sizes[axis] = size
            slots = [jax.lax.dynamic_slice(x, (layer, slot, 0, 0, 0), sizes)[0] for slot in slots_B]
            read = jnp.concatenate(slots)
        return read if axis == 3 else read.swapaxes(2, 3)

    def products(self, products: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """See `Storage`. Without the barrier, libtpu divides the weights into heads, and copies them out of their stack
        for it."""
        return jax.lax.optimization_barrier(tuple(products))


def _placed(
    old: jax.Array,
    axis: int,
    layer: jax.Array | int,
    slots_B: jax.Array,
    starts_B: jax.Array,
    new_LBTJK: jax.Array,
) -> jax.Array:
    """The array with T new positions of each sequence, along `axis` from index `starts_B` on. Indices outside are left
    out."""
    size = old.shape[axis]
    layers, _, length, *_ = new_LBTJK.shape
    count = min(length, size)
    sizes = [layers, 1, *old.shape[HEADS:]]
    sizes[axis] = count
    for number, (slot, start) in enumerate(zip(slots_B, starts_B, strict=True)):
        first = jnp.clip(start, 0, size - count)
        place = [layer, slot, 0, 0, 0]
        place[axis] = first
        kept = jax.lax.dynamic_slice(old, place, sizes)
        # the row of `new` that stands at index `first`
        row = first - start
        rows = row + jnp.arange(count)
        inside = (rows >= 0) & (rows < length) & (slot < old.shape[SLOT])
        new = jnp.moveaxis(new_LBTJK[:, number : number + 1], 2, axis)
        if length > 1:
            padding = [(count, count) if dimension == axis else (0, 0) for dimension in range(new.ndim)]
            new = jax.lax.dynamic_slice_in_dim(jnp.pad(new, padding), row + count, count, axis=axis)
        old = jax.lax.dynamic_update_slice(old, jnp.where(inside[:, None] if axis == 3 else inside, new, kept), place)
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


_STORAGES: dict[str, Storage] = {"tpu": Tiled(), "cpu": Looped()}


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
