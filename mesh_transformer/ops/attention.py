"""Attention over whole sequences and over a cache.

Shapes: B sequences, N slots of a cache, T query positions, S key positions, H heads, K dims of a head, L layers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

_SHORTEST_PART = 64  # queries; shorter parts cost more in small operations than they save
_MASKED = -1e10  # finite: a row that is masked everywhere gives a mean, not a NaN


class KVCache(NamedTuple):
    """Keys and values of every layer, slot and position: each (L, N, H, S, K), heads sharded over tp.

    A slot's entries are valid up to the position that was written last; later ones are never read.
    """

    k_LNHSK: jax.Array
    v_LNHSK: jax.Array

    @classmethod
    def zeros(
        cls, layers: int, slots: int, heads: int, length: int, d_head: int, dtype: jnp.dtype
    ) -> KVCache:
        """An empty cache."""
        return cls(*(jnp.zeros((layers, slots, heads, length, d_head), dtype) for _ in range(2)))

    def view(
        self, slots_B: jax.Array | None = None, length: int | None = None, write: Any = True
    ) -> CacheView:
        """The slots (None: all) and the first positions (None: all) that a call works on.

        Where `write`, (B,) booleans or one, is false, the slot stays as it is.
        """
        n_slots = self.k_LNHSK.shape[1]
        rows_B = jnp.arange(n_slots) if slots_B is None else slots_B
        written_B = jnp.where(write, rows_B, n_slots)
        return CacheView(self, written_B, slots_B, length or self.k_LNHSK.shape[3])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["cache", "written_B", "slots_B"], meta_fields=["length"]
)
@dataclasses.dataclass(frozen=True)
class CacheView:
    """What a model sees of a cache: B slots, and the positions 0 .. length - 1 that attention reads."""

    cache: KVCache
    written_B: jax.Array  # int32 slots; one beyond the last is not written
    slots_B: jax.Array | None  # int32 slots; None: all, in their order
    length: int

    def write(
        self, layer: jax.Array | int, positions_BT: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array
    ) -> CacheView:
        """Put the keys and values of one layer at each slot's positions, in place when donated.

        What lies beyond the cache is dropped.
        """
        at = (layer, self.written_B[:, None], slice(None), positions_BT)
        pairs = zip(self.cache, (k_BTHK, v_BTHK), strict=True)
        cache = KVCache(*(old.at[at].set(new.astype(old.dtype), mode="drop") for old, new in pairs))
        return dataclasses.replace(self, cache=cache)

    def read(self, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """The keys and values of one layer, each (B, H, length, K)."""
        k, v = (
            jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)[:, :, : self.length] for x in self.cache
        )
        return (k, v) if self.slots_B is None else (k[self.slots_B], v[self.slots_B])

    def key_positions(self, positions_BT: jax.Array) -> jax.Array:
        """(1, S): the position of each key that `read` gives."""
        return jnp.arange(self.length)[None]

    def mask(self, positions_BT: jax.Array) -> jax.Array:
        """(B, 1, T, S) booleans: the keys that each query sees."""
        return causal_mask(positions_BT, self.length)


def causal_mask(positions_BT: jax.Array, n_keys: int) -> jax.Array:
    """(B, 1, T, S) booleans: the query at `positions_BT` sees keys at its own position and before."""
    return (jnp.arange(n_keys) <= positions_BT[:, :, None])[:, None]


def attend(
    q_BTHK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_B1TS: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """softmax(q k / sqrt(K) + bias) v with masked keys left out; softmax in float32. Returns (B, T, H, K)."""
    return jnp.einsum("bhts,bhsk->bthk", _weights(q_BTHK, k_BHSK, mask_B1TS, bias_BHTS), v_BHSK)


@jax.custom_vjp
def causal_attend(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """`attend` of a whole sequence to itself. Returns (B, T, H, K).

    The queries go in up to four parts, each with the keys up to its own end: with four, 5/8 of the products and
    of the softmax remain. For the backward pass only the softmax weights are kept, in q's dtype. `bias` is the same
    for all sequences: its B is 1.
    """
    return _causal_attend_forward(q_BTHK, k_BTHK, v_BTHK, bias_BHTS)[0]


def _causal_attend_forward(q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, bias_BHTS: Any) -> Any:
    k_BHSK, v_BHSK = (rearrange(x, "b s h k -> b h s k") for x in (k_BTHK, v_BTHK))
    mixed, kept = [], []
    for rows in _parts(q_BTHK.shape[1]):
        mask_B1TS = causal_mask(jnp.arange(rows.start, rows.stop)[None], rows.stop)
        bias = None if bias_BHTS is None else bias_BHTS[:, :, rows, : rows.stop]
        kept.append(_weights(q_BTHK[:, rows], k_BHSK[:, :, : rows.stop], mask_B1TS, bias))
        mixed.append(jnp.einsum("bhts,bhsk->bthk", kept[-1], v_BHSK[:, :, : rows.stop]))
    return jnp.concatenate(mixed, axis=1), (q_BTHK, k_BHSK, v_BHSK, bias_BHTS, kept)


def _causal_attend_backward(saved: Any, dy_BTHK: jax.Array) -> tuple[Any, ...]:
    q_BTHK, k_BHSK, v_BHSK, bias_BHTS, kept = saved
    dq, dk, dv = [], jnp.zeros(k_BHSK.shape, jnp.float32), jnp.zeros(v_BHSK.shape, jnp.float32)
    dbias = None if bias_BHTS is None else jnp.zeros(bias_BHTS.shape, jnp.float32)
    for rows, weights in zip(_parts(q_BTHK.shape[1]), kept, strict=True):
        keys, dy = slice(rows.stop), dy_BTHK[:, rows]
        dweights = jnp.einsum("bthk,bhsk->bhts", dy, v_BHSK[:, :, keys], preferred_element_type=jnp.float32)
        dlogits = weights * (dweights - (weights * dweights).sum(-1, keepdims=True))
        if dbias is not None:
            dbias = dbias.at[:, :, rows, keys].set(dlogits.sum(0, keepdims=True))
        dlogits = (dlogits / np.sqrt(q_BTHK.shape[-1])).astype(q_BTHK.dtype)
        dq.append(jnp.einsum("bhts,bhsk->bthk", dlogits, k_BHSK[:, :, keys]))
        dk = dk.at[:, :, keys].add(jnp.einsum("bhts,bthk->bhsk", dlogits, q_BTHK[:, rows]))
        dv = dv.at[:, :, keys].add(jnp.einsum("bhts,bthk->bhsk", weights, dy))
    dk, dv = (rearrange(x, "b h s k -> b s h k").astype(dy_BTHK.dtype) for x in (dk, dv))
    if dbias is not None:
        dbias = dbias.astype(bias_BHTS.dtype)
    return jnp.concatenate(dq, axis=1), dk, dv, dbias


causal_attend.defvjp(_causal_attend_forward, _causal_attend_backward)


def _parts(length: int) -> list[slice]:
    """Consecutive rows of a sequence, all of one size."""
    count = next(n for n in (4, 2, 1) if n == 1 or length % (n * _SHORTEST_PART) == 0)
    size = length // count
    return [slice(start, start + size) for start in range(0, length, size)]


def _weights(
    q_BTHK: jax.Array, k_BHSK: jax.Array, mask_B1TS: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """softmax(q k / sqrt(K) + bias), (B, H, T, S), computed in float32, in q's dtype."""
    logits = jnp.einsum("bthk,bhsk->bhts", q_BTHK, k_BHSK, preferred_element_type=jnp.float32)
    logits = logits / np.sqrt(q_BTHK.shape[-1])
    if bias_BHTS is not None:
        logits = logits + bias_BHTS
    return jax.nn.softmax(jnp.where(mask_B1TS, logits, _MASKED), axis=-1).astype(q_BTHK.dtype)


def t5_buckets(n_positions: int, buckets: int = 32, max_distance: int = 128) -> np.ndarray:
    """Bucket of each distance 0 .. n_positions - 1 to an earlier key (Raffel et al. 2020, one direction).

    The first half of the buckets hold one distance each, the rest grow logarithmically up to `max_distance`.
    Returns (n_positions,) int32.
    """
    exact = buckets // 2
    distance = np.arange(n_positions)
    grown = np.log(np.maximum(distance, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (grown / np.log(max_distance / exact) * (buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(far, buckets - 1)).astype(np.int32)
