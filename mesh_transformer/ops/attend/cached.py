"""The cache of the keys and values (or other entries) of each position, and attention to it.

Shapes: N slots of a cache, B slots of one call, T query positions, S positions of a segment, H heads, K dims of a
head, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.families.spec import CacheEntry
from mesh_transformer.ops.attend.causal import attention_logits, causal_mask, parts

# Positions of the first segment.
SHORTEST_SEGMENT = 256
Segment = tuple[jax.Array, ...]
"""The cache of consecutive positions: one array (L, N, H, S, K) for each `CacheEntry` of the attention."""


class KVCache(NamedTuple):
    """The cache of every layer, slot and position.

    XLA copies a slice of an array before it multiplies the slice. So that programs read whole arrays, the positions are
    divided into segments that end at 256, 512, 1024 ..., and layers that are not stacked are groups of one layer.
    A slot's entries are valid up to the position that was written last. Later entries are never read.
    """

    groups: tuple[tuple[Segment, ...], ...]

    @classmethod
    def zeros(
        cls,
        layers: int,
        slots: int,
        length: int,
        entries: Sequence[CacheEntry],
        dtype: jnp.dtype,
        *,
        stacked: bool = True,
    ) -> KVCache:
        """An empty cache; if not `stacked`, each layer has its own arrays."""
        ends = segment_ends(length)
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]

        def group(layers: int) -> tuple[Segment, ...]:
            shapes = [[(layers, slots, e.heads, size, e.width) for e in entries] for size in sizes]
            return tuple(tuple(jnp.zeros(shape, dtype) for shape in segment) for segment in shapes)

        return cls((group(layers),) if stacked else tuple(group(1) for _ in range(layers)))

    def map(self, entries: Sequence[CacheEntry], function: Any) -> KVCache:
        """The cache with function(array, names of its dimensions) in place of each array; `entries` give the names."""
        names = [(None, None, entry.name, None, None) for entry in entries]
        return KVCache(tuple(tuple(tuple(map(function, segment, names)) for segment in group) for group in self.groups))

    def view(self, slots_B: jax.Array | None, length: int, write: Any = True) -> CacheView:
        """A view of some slots (None: all) and of positions 0 .. length - 1.

        `write`, (B,) booleans or one boolean, says which slots may change.
        """
        rows_B = jnp.arange(self.n_slots) if slots_B is None else slots_B
        return CacheView(self, jnp.where(write, rows_B, self.n_slots), slots_B, length)

    @property
    def n_slots(self) -> int:
        """N."""
        return self.groups[0][0][0].shape[1]


def segment_ends(length: int) -> list[int]:
    """The ends of the segments of a cache of `length` positions: 256, 512, 1024 ... and `length`."""
    ends = []
    end = SHORTEST_SEGMENT
    while end < length:
        ends.append(end)
        end *= 2
    return [*ends, length]


class KeyValueView(Protocol):
    """What attention reads keys and values from: of all layers, or of one layer, whose index is 0."""

    triangular: ClassVar[bool]
    """Whether the keys are at the queries' own positions, in the same order, and no query sees a later key."""

    def write(self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array) -> Any:
        """The view with the entries of one layer at these positions, (B, T, H, K) each, stored."""

    def read(self, layer: jax.Array | int) -> Sequence[Sequence[jax.Array]]:
        """The entries of one layer: for consecutive parts of the positions, the arrays (B, H, S, K)."""

    def mask(self, positions_BT: jax.Array, window: int | None) -> jax.Array:
        """(B, 1, T, S) booleans: whether the query at each position sees each key."""

    def layers(self, count: int) -> list[Any]:
        """A view of each layer."""

    def with_layers(self, views: Sequence[Any]) -> Any:
        """The view with its layers replaced."""

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """(B or 1, S): the position of each key, given the positions of the queries."""


class Cached:
    """An `Attend` to the keys and values of a view. A call first writes those of `positions_BT` into the view.

    The queries are at `query_positions_BT`, all or some of these positions; `bias_BHTS` is for the queries.
    """

    def __init__(
        self,
        view: Any,
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
        k_BTHK: jax.Array,
        v_BTHK: jax.Array,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """See `Attend`."""
        self.view = self.view.write(self.layer, self.positions_BT, k_BTHK, v_BTHK)
        keys, mask_B1TS = self.view.read(self.layer), self.view.mask(self.query_positions_BT, window)
        attend = _attend_triangular if self.view.triangular else _attend
        return attend(q_BTHK, keys, mask_B1TS, self.bias_BHTS, scale, softcap)


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
    logits_BHTS = attention_logits(q_BTHK, [k for k, _ in keys], mask_B1TS, bias_BHTS, scale, softcap)
    exp_BHTS = jnp.exp(logits_BHTS - logits_BHTS.max(-1, keepdims=True))
    total_BHT1 = exp_BHTS.sum(-1, keepdims=True)
    weights_BHTS, start = exp_BHTS.astype(q_BTHK.dtype), 0
    mixed_BHTK = jnp.zeros((), jnp.float32)
    for _, v_BHSK in keys:
        stop = start + v_BHSK.shape[2]
        mixed_BHTK += jnp.matmul(weights_BHTS[..., start:stop], v_BHSK, preferred_element_type=jnp.float32)
        start = stop
    return rearrange((mixed_BHTK / total_BHT1).astype(q_BTHK.dtype), "b h t k -> b t h k")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache", "written_B", "slots_B"], meta_fields=["length"]
)
@dataclasses.dataclass(frozen=True)
class CacheView:
    """A `KeyValueView` of B slots of a cache and of the positions 0 .. length - 1."""

    triangular: ClassVar[bool] = False
    cache: KVCache
    # int32: the slots to write; a slot beyond the last is not written
    written_B: jax.Array
    # int32: the slots to read; None: all, in order
    slots_B: jax.Array | None
    length: int

    def write(self, layer: jax.Array | int, positions_BT: jax.Array, *new: jax.Array) -> CacheView:
        """See `KeyValueView`. In place if the cache is donated; positions from `length` on may be dropped."""
        written_B = self.written_B
        # XLA for CPU turns a scatter of one element into slices, for which it copies the cache.
        if positions_BT.size == 1:
            written_B = jnp.concatenate([written_B, jnp.full_like(written_B, self.cache.n_slots)])
            positions_BT, new = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), (positions_BT, new))
        (group,) = self.cache.groups
        segments, start = list(group), 0
        for i, segment in enumerate(segments):
            size = segment[0].shape[3]
            if start < self.length:
                inside = (positions_BT >= start) & (positions_BT < start + size)
                # an index beyond the last position is dropped
                at = jnp.where(inside, positions_BT - start, size)
                where = (layer, written_B[:, None], slice(None), at)
                segments[i] = tuple(
                    old.at[where].set(x.astype(old.dtype), mode="drop") for old, x in zip(segment, new, strict=True)
                )
            start += size
        return dataclasses.replace(self, cache=KVCache((tuple(segments),)))

    def read(self, layer: jax.Array | int) -> list[Segment]:
        """See `KeyValueView`."""
        (group,) = self.cache.groups
        found, left = [], self.length
        for segment in group:
            if left <= 0:
                break
            size = min(left, segment[0].shape[3])
            arrays = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, :size] for x in segment)
            found.append(tuple(x if self.slots_B is None else x[self.slots_B] for x in arrays))
            left -= size
        return found

    def mask(self, positions_BT: jax.Array, window: int | None) -> jax.Array:
        """See `KeyValueView`."""
        return causal_mask(positions_BT, self.length, window)

    def layers(self, count: int) -> list[CacheView]:
        """See `KeyValueView`; the cache is not stacked."""
        assert len(self.cache.groups) == count
        return [dataclasses.replace(self, cache=KVCache((group,))) for group in self.cache.groups]

    def with_layers(self, views: Sequence[CacheView]) -> CacheView:
        """See `KeyValueView`."""
        return dataclasses.replace(self, cache=KVCache(tuple(view.cache.groups[0] for view in views)))

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """See `KeyValueView`."""
        return jnp.arange(self.length)[None]
