"""The cache of the keys and values (or other entries) of each position, and attention to it.

Shapes: N slots of a cache, B slots of one call, T query positions, S positions of a segment, H heads, J heads of keys
and values, K dims of a head, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer.ops.attend.blocks import MakeKeys, StoredBlocks, attend_blocks
from mesh_transformer.ops.attend.causal import attention_logits, fold_heads, parts, sees, unfold_heads
from mesh_transformer.ops.attend.storage import (
    Group,
    NewEntries,
    Segment,
    axes_of,
    capacity,
    positions,
    storage,
    with_copies,
    zeros,
)
from mesh_transformer.spec import Axes, CacheEntry

# Positions of the first segment.
SHORTEST_SEGMENT = 256
Entries = tuple[CacheEntry, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["groups"], meta_fields=["group_of", "entries"])
@dataclasses.dataclass(frozen=True)
class KVCache:
    """The cache of every layer, slot and position.

    Where XLA copies a slice of an array before it multiplies the slice (`Storage.copies_slices`), and programs read
    fixed numbers of positions, these are divided into segments that end at 256, 512, 1024 ..., so that programs read
    whole arrays. Layers that are not
    stacked are groups of one layer.

    A slot's entries are valid up to the position that was written last. Later entries are never read.

    A group that holds fewer positions than the context is a ring buffer: position p stands at index p mod S. Only
    layers with a window can use one (`ring_length`).
    """

    groups: tuple[Group, ...]
    # L numbers: the group of each layer; the layers of a group stand in it in their order
    group_of: tuple[int, ...]
    # the entries of each group
    entries: tuple[Entries, ...]

    @classmethod
    def zeros(
        cls, lengths: Sequence[int], slots: int, entries: Sequence[Entries], dtype: jnp.dtype, *, stacked: bool = True
    ) -> KVCache:
        """An empty cache: `lengths` positions and `entries` for each layer.

        If `stacked`, the layers of one length and of equal entries share their arrays, else each layer has its own.
        """

        def group(layers: int, length: int, entries: Entries) -> Group:
            ends = segment_ends(length) if storage().copies_slices else [length]
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            return tuple(tuple(zeros(e, layers, slots, size, dtype) for e in entries) for size in sizes)

        layers = list(zip(lengths, entries, strict=True))
        if not stacked:
            return cls(tuple(group(1, *layer) for layer in layers), tuple(range(len(layers))), tuple(entries))
        distinct = list(dict.fromkeys(layers))
        groups = tuple(group(layers.count(layer), *layer) for layer in distinct)
        return cls(groups, tuple(map(distinct.index, layers)), tuple(entries for _, entries in distinct))

    def map(self, function: Callable[[jax.Array, Axes], Any]) -> KVCache:
        """The cache with function(array, names of its dimensions) in place of each array."""
        groups = []
        for group, entries in zip(self.groups, self.entries, strict=True):
            names = [axes_of(entry.name) for entry in entries]
            groups.append(tuple(tuple(map(function, segment, names)) for segment in group))
        return dataclasses.replace(self, groups=tuple(groups))

    def view(
        self,
        slots_B: jax.Array | None,
        length: int,
        write: jax.Array | bool = True,
        ends_B: jax.Array | None = None,
    ) -> CacheView:
        """A view of the slots `slots_B`, or of all slots if it is None, and of positions 0 .. length - 1.

        Args:
            write: (B,) booleans or one boolean: which slots may change.
            ends_B: int32, the end of the positions that a query of each slot sees. A platform that reads blocks
                (`Storage.block`) reads up to the largest of them, if they are given, instead of `length`.
        """
        rows_B = jnp.arange(self.n_slots) if slots_B is None else slots_B
        end = None if ends_B is None or storage().block is None else ends_B.max()
        return CacheView(self, jnp.where(write, rows_B, self.n_slots), slots_B, end, length)

    def copied(self, source: jax.Array, target: jax.Array, length: jax.Array) -> KVCache:
        """The cache with the first `length` positions of the slot `source`, or more, in the slot `target` too."""
        size = storage().block
        if size is None:
            return jax.tree.map(lambda x: x.at[:, target].set(x[:, source]), self)

        def copied_block(number: jax.Array, cache: KVCache) -> KVCache:
            def copied(x: jax.Array) -> jax.Array:
                layers, _, heads, positions, width = x.shape
                # beyond the last block of an array, this copies it again
                start = number * min(size, positions)
                sizes = (layers, 1, heads, min(size, positions), width)
                block = jax.lax.dynamic_slice(x, (0, source, 0, start, 0), sizes)
                return jax.lax.dynamic_update_slice(x, block, (0, target, 0, start, 0))

            return jax.tree.map(copied, cache)

        return jax.lax.fori_loop(0, (length + size - 1) // size, copied_block, self)

    @property
    def n_slots(self) -> int:
        """N."""
        return self.groups[0][0][0].shape[1]


def ring_length(context: int, window: int | None, longest_chunk: int) -> int:
    """The positions that the cache of a layer holds for a slot: `context`, or fewer if the layer has a window.

    A chunk of a prompt is written before its queries attend, and its last position must not replace a key that the
    window of its first query holds: S >= window + chunk - 1.
    """
    return context if window is None else min(context, window + longest_chunk - 1)


def segment_ends(length: int) -> list[int]:
    """The ends of the segments of a cache of `length` positions: 256, 512, 1024 ... and `length`."""
    ends = []
    end = SHORTEST_SEGMENT
    while end < length:
        ends.append(end)
        end *= 2
    return [*ends, length]


class KeyValueView(Protocol):
    """The keys and values that attention reads and writes: of all layers, or of one layer, whose index is 0."""

    latent: ClassVar[bool]
    """Whether latent attention stores its latents instead of keys and values of all heads."""
    triangular: ClassVar[bool]
    """Whether the keys are at the queries' own positions, in the same order, and no query sees a later key."""
    separate: ClassVar[bool]
    """Whether attention keeps logits per part: to concatenate a long and a short part would copy both."""

    def update(self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array) -> tuple[Self, Stored]:
        """Store the entries of one layer at these positions, (B, T, J, K) each.

        Returns the view that has them, and all entries of the layer.
        """

    def mask(self, positions_BT: jax.Array, window: jax.Array | int | None) -> jax.Array:
        """(B, 1, T, S) booleans: whether the query at each position sees each key."""

    def split(self, layers: int) -> tuple[list[Self], Sequence[int]]:
        """Views, each of one or several layers, and for each layer the number of its view. A view counts its layers
        from 0."""

    def joined(self, views: Sequence[Any]) -> KeyValueView:
        """The view with the views of `split` replaced, or a view of the cache after the call."""

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """(B or 1, S): the position of each key, given the positions of the queries."""


class Cached:
    """An `Attend` to the keys and values of a view. A call first writes the given keys and values, of `positions_BT`,
    into the view.

    The queries are at `query_positions_BT`, all or some of these positions; `bias_BHTS` is for the queries.
    """

    def __init__(
        self,
        view: KeyValueView,
        layer: jax.Array | int,
        positions_BT: jax.Array,
        query_positions_BT: jax.Array,
        bias_BHTS: jax.Array | None,
    ):
        self.view, self.layer, self.bias_BHTS = view, layer, bias_BHTS
        self.positions_BT, self.query_positions_BT = positions_BT, query_positions_BT

    def __call__(
        self,
        q_BTHK: jax.Array,
        k_BTJK: jax.Array,
        v_BTJV: jax.Array,
        *,
        scale: float,
        window: jax.Array | int | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """See `Attend`."""
        return self.attend(q_BTHK, self.update(k_BTJK, v_BTJV), scale=scale, window=window, softcap=softcap)

    def update(self, *new: jax.Array) -> Stored:
        """Write the entries of `positions_BT`, (B, T, J, K) each. Returns all entries of the layer, as
        `KeyValueView.update` does."""
        self.view, entries = self.view.update(self.layer, self.positions_BT, *new)
        return entries

    def positions(self, stored: Stored) -> int:
        """The largest number of positions that attention to these entries reads."""
        if isinstance(stored, StoredBlocks):
            return int(stored.arrays[0].shape[3])
        return sum(part[0].shape[2] for part in stored)

    @staticmethod
    def products(*products: jax.Array) -> Sequence[jax.Array]:
        """Products of weights that become queries, keys or values, (B, T, F) each: see `Storage.products`."""
        return storage().products(products)

    def attend(
        self,
        q_BTHK: jax.Array,
        stored: Stored,
        *,
        scale: float,
        window: jax.Array | int | None = None,
        softcap: float | None = None,
        make: MakeKeys | None = None,
    ) -> jax.Array:
        """Attention to the entries that `update` returned: keys (B, J, S, K) and values (B, J, S, V), or one array that
        is both.

        Args:
            make: makes keys and values from the arrays of some positions. None: the arrays are these.
        """
        if isinstance(stored, StoredBlocks):
            assert isinstance(self.view, CacheView)
            mask = functools.partial(self.view.mask, self.query_positions_BT, window)
            return attend_blocks(q_BTHK, stored, mask, self.bias_BHTS, scale, softcap, make)
        keys = stored if make is None else [make(*part) for part in stored]
        mask_B1TS = self.view.mask(self.query_positions_BT, window)
        attend = _attend_parts if self.view.separate else _attend_triangular if self.view.triangular else _attend
        return attend(q_BTHK, keys, mask_B1TS, self.bias_BHTS, scale, softcap)


# the entries of a layer: for consecutive parts of the positions, the arrays (B, J, S, K); or blocks of them
Stored = Sequence[Sequence[jax.Array]] | StoredBlocks


def _attend_triangular(
    q_BTHK: jax.Array,
    keys: Sequence[Sequence[jax.Array]],
    mask_B1TS: jax.Array,
    bias_BHTS: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """`_attend` for a view that is `triangular` and has one part of keys.

    The queries are computed in parts, each with the keys up to its last query.
    """
    ((k_BHSK, v_BHSK),) = keys
    mixed = []
    for rows in parts(q_BTHK.shape[1]):
        seen = slice(rows.stop)
        bias = None if bias_BHTS is None else bias_BHTS[:, :, rows, seen]
        part = k_BHSK[:, :, seen], v_BHSK[:, :, seen]
        mixed.append(_attend(q_BTHK[:, rows], [part], mask_B1TS[:, :, rows, seen], bias, scale, softcap))
    return jnp.concatenate(mixed, axis=1)


def _attend(
    q_BTHK: jax.Array,
    keys: Sequence[Sequence[jax.Array]],
    mask_B1TS: jax.Array,
    bias_BHTS: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """softmax(logits) v. The division by the sum comes last, on K numbers for each query instead of S."""
    shared = q_BTHK.shape[2] // keys[0][0].shape[1]
    q_BTHK = fold_heads(q_BTHK, shared)
    logits_BHTS = attention_logits(q_BTHK, [part[0] for part in keys], mask_B1TS, bias_BHTS, scale, softcap)
    exp_BHTS = jnp.exp(logits_BHTS - logits_BHTS.max(-1, keepdims=True))
    total_BHT1 = exp_BHTS.sum(-1, keepdims=True)
    weights_BHTS, start = exp_BHTS.astype(q_BTHK.dtype), 0
    mixed_BHTK = jnp.zeros((), jnp.float32)
    for part in keys:
        v_BHSK = part[-1]
        stop = start + v_BHSK.shape[2]
        mixed_BHTK += jnp.matmul(weights_BHTS[..., start:stop], v_BHSK, preferred_element_type=jnp.float32)
        start = stop
    return unfold_heads(rearrange((mixed_BHTK / total_BHT1).astype(q_BTHK.dtype), "b h t k -> b t h k"), shared)


def _attend_parts(
    q_BTHK: jax.Array,
    keys: Sequence[Sequence[jax.Array]],
    mask_B1TS: jax.Array,
    bias_BHTS: jax.Array | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """`_attend`, part by part, with at least as many rows as a product needs."""
    shared = q_BTHK.shape[2] // keys[0][0].shape[1]
    folded = fold_heads(q_BTHK, shared)
    rows = folded.shape[1]
    q = with_copies(folded, axis=1)
    if bias_BHTS is not None:
        bias_BHTS = with_copies(bias_BHTS, axis=2)
    ends = np.cumsum([part[0].shape[2] for part in keys])
    logits = []
    for part, stop in zip(keys, ends, strict=True):
        seen = slice(stop - part[0].shape[2], stop)
        bias = None if bias_BHTS is None else bias_BHTS[..., seen]
        logits.append(attention_logits(q, part[:1], mask_B1TS[..., seen], bias, scale, softcap))
    top_BHT1 = functools.reduce(jnp.maximum, (part_logits.max(-1, keepdims=True) for part_logits in logits))
    exps = [jnp.exp(part_logits - top_BHT1) for part_logits in logits]
    total_BHT1 = functools.reduce(jnp.add, (exp.sum(-1, keepdims=True) for exp in exps))
    products = (
        jnp.matmul(exp.astype(q.dtype), part[-1], preferred_element_type=jnp.float32)
        for exp, part in zip(exps, keys, strict=True)
    )
    mixed_BHTK = functools.reduce(jnp.add, products) / total_BHT1
    return unfold_heads(rearrange(mixed_BHTK[:, :, :rows].astype(q.dtype), "b h t k -> b t h k"), shared)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache", "written_B", "slots_B", "end"], meta_fields=["length"]
)
@dataclasses.dataclass(frozen=True)
class CacheView:
    """A `KeyValueView` of B slots of a cache and of the positions 0 .. length - 1.

    `write`, `read` and `mask` need a cache of one group. If it holds fewer than `length` positions, it is a ring.
    """

    latent: ClassVar[bool] = True
    triangular: ClassVar[bool] = False
    separate: ClassVar[bool] = False
    cache: KVCache
    # int32: the slots to write; a slot beyond the last is not written
    written_B: jax.Array
    # int32: the slots to read; None for all, in order
    slots_B: jax.Array | None
    # int32: the end of the positions that are read in blocks; None: `length` positions are read as a whole
    end: jax.Array | None
    length: int

    @property
    def capacity(self) -> int:
        """S: the positions that the group holds."""
        (group,) = self.cache.groups
        return capacity(group, self.entries)

    def write(self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array) -> CacheView:
        """The view with these entries, as `update` stores them. In place if the cache is donated; positions from
        `length` on may be dropped."""
        if self.length > self.capacity:
            positions_BT = positions_BT % self.capacity
        (group,) = self.cache.groups
        entries = NewEntries(self.entries, layer, self.written_B, positions_BT, new, self.length)
        written = storage().write(group, entries)
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, groups=(written,)))

    def update(self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array) -> tuple[CacheView, Stored]:
        """See `KeyValueView`."""
        view = self.write(layer, positions_BT, *new)
        return view, view.read(layer) if self.end is None else view._blocks(layer, self.end)

    def _blocks(self, layer: jax.Array | int, end: jax.Array) -> StoredBlocks:
        ((segment,),) = self.cache.groups
        held = self.capacity
        size = storage().block
        assert size is not None
        return StoredBlocks(segment, layer, self.slots_B, jnp.minimum(end, held), min(size, held))

    def read(self, layer: jax.Array | int) -> list[Segment]:
        """The entries of one layer, in parts."""
        (group,) = self.cache.groups
        segments, left = [], self.length
        for segment in group:
            if left <= 0:
                break
            size = min(left, positions(segment, self.entries))
            arrays = zip(segment, self.entries, strict=True)
            segments.append(tuple(storage().read(x, entry, layer, self.slots_B, size) for x, entry in arrays))
            left -= size
        return segments

    def mask(
        self, positions_BT: jax.Array, window: jax.Array | int | None, keys_S: jax.Array | None = None
    ) -> jax.Array:
        """See `KeyValueView`: all keys, or those at the indices `keys_S` of the cache."""
        if keys_S is None:
            keys_S = jnp.arange(min(self.length, self.capacity))
        if self.length <= self.capacity:
            return sees(positions_BT, keys_S[None], window)[:, None]
        # A query takes each index for the newest position at it that is not after the query's own. Where a later
        # position has replaced that one, the window starts after it (`ring_length`, `SlotEngine.holds`).
        assert window is not None
        distance_BTS = (positions_BT[:, :, None] - keys_S[None, None]) % self.capacity
        return ((distance_BTS < window) & (distance_BTS <= positions_BT[:, :, None]))[:, None]

    def split(self, layers: int) -> tuple[list[CacheView], Sequence[int]]:
        """See `KeyValueView`: a view of each group."""
        assert len(self.cache.group_of) == layers
        return list(map(self._of, self.cache.groups, self.cache.entries)), self.cache.group_of

    def joined(self, views: Sequence[CacheView]) -> CacheView:
        """See `KeyValueView`."""
        groups = tuple(view.cache.groups[0] for view in views)
        return dataclasses.replace(self, cache=dataclasses.replace(self.cache, groups=groups))

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """See `KeyValueView`. A ring has none: there they depend on the query."""
        assert all(self.length <= capacity(*group) for group in zip(self.cache.groups, self.cache.entries, strict=True))
        return jnp.arange(self.length)[None]

    def _of(self, group: Group, entries: Entries) -> CacheView:
        """A view of one group."""
        return dataclasses.replace(self, cache=KVCache((group,), (0,) * group[0][0].shape[0], (entries,)))

    @property
    def entries(self) -> Entries:
        """The kinds of entries."""
        (entries,) = self.cache.entries
        return entries
