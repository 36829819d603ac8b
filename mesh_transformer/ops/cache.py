"""The cache of keys and values, and what attention sees of it.

Shapes: N slots of a cache, B of them that a call works on, T query positions, S positions of a segment, H heads, K dims of a
head, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp

SHORTEST_SEGMENT = 256  # positions


class Segment(NamedTuple):
    """Keys and values of some consecutive positions of every slot: each (L, N, H, S, K), heads sharded over tp."""

    k_LNHSK: jax.Array
    v_LNHSK: jax.Array


class KVCache(NamedTuple):
    """Keys and values of every layer, slot and position.

    Its arrays are what a program reads whole, because XLA copies what is sliced out of a larger array for a product: the
    positions come in segments that end at 256, 512, 1024 ..., and layers that are not in one stack are groups of one.
    A slot's entries are valid up to the position that was written last; later ones are never read.
    """

    groups: tuple[tuple[Segment, ...], ...]

    @classmethod
    def zeros(
        cls,
        layers: int,
        slots: int,
        heads: int,
        length: int,
        d_head: int,
        dtype: jnp.dtype,
        *,
        stacked: bool = True,
    ) -> KVCache:
        """An empty cache; not `stacked`: each layer has its own arrays."""

        def group(layers: int) -> tuple[Segment, ...]:
            ends = segment_ends(length)
            sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
            return tuple(
                Segment(*(jnp.zeros((layers, slots, heads, size, d_head), dtype) for _ in range(2)))
                for size in sizes
            )

        return cls((group(layers),) if stacked else tuple(group(1) for _ in range(layers)))

    def view(self, slots_B: jax.Array | None, length: int, write: Any = True) -> CacheView:
        """The slots (None: all) and the first positions that a call works on.

        Where `write`, (B,) booleans or one, is false, the slot stays as it is.
        """
        rows_B = jnp.arange(self.n_slots) if slots_B is None else slots_B
        return CacheView(self, jnp.where(write, rows_B, self.n_slots), slots_B, length)

    @property
    def n_slots(self) -> int:
        """Sequences that there is room for."""
        return self.groups[0][0].k_LNHSK.shape[1]


def segment_ends(length: int) -> list[int]:
    """Where the segments of a cache of `length` positions end: 256, 512, 1024 ... and `length`."""
    ends = []
    end = SHORTEST_SEGMENT
    while end < length:
        ends.append(end)
        end *= 2
    return [*ends, length]


class Keys(Protocol):
    """What attention needs of the place where keys and values are kept: of all layers, or of one, which is layer 0."""

    triangular: ClassVar[bool]
    """Whether the keys are those of the queries' positions, none of which sees a later one. See `ops.attention.attend`."""

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array
    ) -> Any:
        """The same with the keys and values of one layer put at their positions."""

    def read(self, layer: jax.Array | int) -> Sequence[tuple[jax.Array, jax.Array]]:
        """The keys and values of one layer, each (B, H, S, K), in parts of consecutive positions."""

    def mask(self, positions_BT: jax.Array) -> jax.Array:
        """(B, 1, T, S) booleans: which of all keys the query at each position sees."""

    def layers(self, count: int) -> list[Any]:
        """The same for each layer."""

    def with_layers(self, views: Sequence[Any]) -> Any:
        """The same with its layers replaced."""

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """(B or 1, S): the position of each of all keys, given those of the queries."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache", "written_B", "slots_B"], meta_fields=["length"]
)
@dataclasses.dataclass(frozen=True)
class CacheView:
    """What a model sees of a cache: B slots, and the positions 0 .. length - 1. See `Keys`."""

    triangular: ClassVar[bool] = False
    cache: KVCache
    written_B: jax.Array  # int32 slots; one beyond the last is not written
    slots_B: jax.Array | None  # int32 slots; None: all, in their order
    length: int

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array
    ) -> CacheView:
        """In place when donated; what lies beyond `length` may be dropped."""
        written_B = self.written_B
        if (
            positions_BT.size == 1
        ):  # XLA for CPU makes slices of a scatter of one, and copies of the cache for them
            written_B = jnp.concatenate([written_B, jnp.full_like(written_B, self.cache.n_slots)])
            positions_BT, k_BTHK, v_BTHK = (jnp.repeat(x, 2, axis=0) for x in (positions_BT, k_BTHK, v_BTHK))
        (group,) = self.cache.groups
        segments, start = list(group), 0
        for i, segment in enumerate(segments):
            size = segment.k_LNHSK.shape[3]
            if start < self.length:
                inside = (positions_BT >= start) & (positions_BT < start + size)
                at = jnp.where(inside, positions_BT - start, size)  # one beyond the last is dropped
                where = (layer, written_B[:, None], slice(None), at)
                new = zip(segment, (k_BTHK, v_BTHK), strict=True)
                segments[i] = Segment(
                    *(old.at[where].set(x.astype(old.dtype), mode="drop") for old, x in new)
                )
            start += size
        return dataclasses.replace(self, cache=KVCache((tuple(segments),)))

    def read(self, layer: jax.Array | int) -> list[tuple[jax.Array, jax.Array]]:
        """See `Keys`."""
        (group,) = self.cache.groups
        parts, left = [], self.length
        for segment in group:
            if left <= 0:
                break
            size = min(left, segment.k_LNHSK.shape[3])
            k, v = (jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, :size] for x in segment)
            parts.append((k, v) if self.slots_B is None else (k[self.slots_B], v[self.slots_B]))
            left -= size
        return parts

    def mask(self, positions_BT: jax.Array) -> jax.Array:
        """See `Keys`."""
        return causal_mask(positions_BT, self.length)

    def layers(self, count: int) -> list[CacheView]:
        """See `Keys`; the cache is not stacked."""
        assert len(self.cache.groups) == count
        return [dataclasses.replace(self, cache=KVCache((group,))) for group in self.cache.groups]

    def with_layers(self, views: Sequence[CacheView]) -> CacheView:
        """See `Keys`."""
        return dataclasses.replace(self, cache=KVCache(tuple(view.cache.groups[0] for view in views)))

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """See `Keys`."""
        return jnp.arange(self.length)[None]


def causal_mask(positions_BT: jax.Array, n_keys: int) -> jax.Array:
    """(B, 1, T, S) booleans: the query at `positions_BT` sees keys at its own position and before."""
    return (jnp.arange(n_keys) <= positions_BT[:, :, None])[:, None]
