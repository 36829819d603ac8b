"""Attention over whole sequences and over a cache.

Shapes: B sequences (or slots), T query positions, S key positions, H heads, K dims of a head, L layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
