"""Attention over whole sequences and over a cache.

Shapes: B sequences (or slots), T query positions, S key positions, H heads, K dims of a head, L layers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

_SHORTEST_PART = 64  # queries; shorter parts cost more in small operations than they save
_MASKED = -1e10  # finite: a row that is masked everywhere gives a mean, not a NaN


class KVCache(NamedTuple):
    """Keys and values of every layer, slot and position: each (L, B, H, S, K), heads sharded over tp.

    A slot's entries are valid up to the position that was written last; later ones are never read.
    """

    k_LBHSK: jax.Array
    v_LBHSK: jax.Array

    @classmethod
    def zeros(
        cls, layers: int, slots: int, heads: int, length: int, d_head: int, dtype: jnp.dtype
    ) -> KVCache:
        """An empty cache."""
        return cls(*(jnp.zeros((layers, slots, heads, length, d_head), dtype) for _ in range(2)))

    @property
    def length(self) -> int:
        """Positions a slot has room for."""
        return self.k_LBHSK.shape[3]

    def write(
        self, layer: jax.Array, positions_BT: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array
    ) -> KVCache:
        """Put the keys and values of one layer at each slot's positions, in place when donated."""
        slots = jnp.arange(positions_BT.shape[0])[:, None]
        at = (layer, slots, slice(None), positions_BT)
        return KVCache(
            self.k_LBHSK.at[at].set(k_BTHK.astype(self.k_LBHSK.dtype)),
            self.v_LBHSK.at[at].set(v_BTHK.astype(self.v_LBHSK.dtype)),
        )

    def read(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values of one layer, each (B, H, S, K)."""
        return (
            jax.lax.dynamic_index_in_dim(self.k_LBHSK, layer, keepdims=False),
            jax.lax.dynamic_index_in_dim(self.v_LBHSK, layer, keepdims=False),
        )


def causal_mask(positions_BT: jax.Array, n_keys: int) -> jax.Array:
    """(B, 1, T, S) booleans: the query at `positions_BT` sees keys at its own position and before."""
    return (jnp.arange(n_keys) <= positions_BT[:, :, None])[:, None]


def attend(
    q_BTHK: jax.Array, k_BHSK: jax.Array, v_BHSK: jax.Array, mask_B1TS: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """softmax(q k / sqrt(K) + bias) v with masked keys left out; softmax in float32. Returns (B, T, H, K)."""
    logits = jnp.einsum("bthk,bhsk->bhts", q_BTHK, k_BHSK, preferred_element_type=jnp.float32)
    logits = logits / np.sqrt(q_BTHK.shape[-1])
    if bias_BHTS is not None:
        logits = logits + bias_BHTS
    weights = jax.nn.softmax(jnp.where(mask_B1TS, logits, _MASKED), axis=-1).astype(v_BHSK.dtype)
    return jnp.einsum("bhts,bhsk->bthk", weights, v_BHSK)


def causal_attend(
    q_BTHK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """`attend` of a whole sequence to itself. Returns (B, T, H, K).

    The queries go in up to four parts, each with the keys up to its own end: with four, 5/8 of the products and
    of the softmax remain.
    """
    length = q_BTHK.shape[1]
    parts = next(n for n in (4, 2, 1) if n == 1 or length % (n * _SHORTEST_PART) == 0)
    k_BHSK, v_BHSK = (rearrange(x, "b s h k -> b h s k") for x in (k_BTHK, v_BTHK))
    mixed = []
    for end in range(length // parts, length + 1, length // parts):
        rows = slice(end - length // parts, end)
        mask_B1TS = causal_mask(jnp.arange(rows.start, end)[None], end)
        bias = None if bias_BHTS is None else bias_BHTS[:, :, rows, :end]
        mixed.append(attend(q_BTHK[:, rows], k_BHSK[:, :, :end], v_BHSK[:, :, :end], mask_B1TS, bias))
    return jnp.concatenate(mixed, axis=1)


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
