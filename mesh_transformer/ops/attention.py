"""Attention over whole sequences and over a cache.

Shapes: B sequences, T query positions, S key positions, H heads, K dims of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer.ops.cache import causal_mask

_SHORTEST_PART = 64  # queries; shorter parts cost more in small operations than they save
_MASKED = -1e10  # finite: a row that is masked everywhere gives a mean, not a NaN


def attend(
    q_BTHK: jax.Array,
    parts: Sequence[tuple[jax.Array, jax.Array]],
    mask_B1TS: jax.Array,
    bias_BHTS: jax.Array | None,
    *,
    triangular: bool = False,
) -> jax.Array:
    """softmax(q k / sqrt(K) + bias) v with masked keys left out; softmax in float32.

    Args:
        parts: the keys and values of consecutive positions, (B, H, part of S, K) each.
        triangular: there is one part, of the queries' own positions, and the mask leaves out every key after its query. The
            queries then go in some parts, each with the keys up to its end.

    Returns:
        (B, T, H, K)
    """
    if not triangular:
        return _attend(q_BTHK, parts, mask_B1TS, bias_BHTS)
    ((k_BHSK, v_BHSK),) = parts
    mixed = []
    for rows in _parts(q_BTHK.shape[1]):
        keys = slice(rows.stop)
        bias = None if bias_BHTS is None else bias_BHTS[:, :, rows, keys]
        part = k_BHSK[:, :, keys], v_BHSK[:, :, keys]
        mixed.append(_attend(q_BTHK[:, rows], [part], mask_B1TS[:, :, rows, keys], bias))
    return jnp.concatenate(mixed, axis=1)


def _attend(
    q_BTHK: jax.Array,
    parts: Sequence[tuple[jax.Array, jax.Array]],
    mask_B1TS: jax.Array,
    bias_BHTS: jax.Array | None,
) -> jax.Array:
    """The softmax's division comes last: K numbers for each query instead of S."""
    logits_BHTS = _logits(q_BTHK, [k for k, _ in parts], mask_B1TS, bias_BHTS)
    powers_BHTS = jnp.exp(logits_BHTS - logits_BHTS.max(-1, keepdims=True))
    total_BHT1 = powers_BHTS.sum(-1, keepdims=True)
    weights_BHTS, start = powers_BHTS.astype(q_BTHK.dtype), 0
    mixed_BHTK = jnp.zeros((), jnp.float32)
    for _, v_BHSK in parts:
        stop = start + v_BHSK.shape[2]
        mixed_BHTK += jnp.matmul(weights_BHTS[..., start:stop], v_BHSK, preferred_element_type=jnp.float32)
        start = stop
    return rearrange((mixed_BHTK / total_BHT1).astype(q_BTHK.dtype), "b h t k -> b t h k")


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
        kept.append(_weights(q_BTHK[:, rows], [k_BHSK[:, :, : rows.stop]], mask_B1TS, bias))
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
    count = next(n for n in (4, 3, 2, 1) if n == 1 or length % (n * _SHORTEST_PART) == 0)
    size = length // count
    return [slice(start, start + size) for start in range(0, length, size)]


def _weights(
    q_BTHK: jax.Array, parts: Sequence[jax.Array], mask_B1TS: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """softmax(q k / sqrt(K) + bias), (B, H, T, S), computed in float32, in q's dtype."""
    return jax.nn.softmax(_logits(q_BTHK, parts, mask_B1TS, bias_BHTS), axis=-1).astype(q_BTHK.dtype)


def _logits(
    q_BTHK: jax.Array, parts: Sequence[jax.Array], mask_B1TS: jax.Array, bias_BHTS: jax.Array | None
) -> jax.Array:
    """q k / sqrt(K) + bias where a key is seen, (B, H, T, S), float32."""
    products = [_products(q_BTHK, k_BHSK) for k_BHSK in parts]
    logits = jnp.concatenate(products, axis=-1) / np.sqrt(q_BTHK.shape[-1])
    if bias_BHTS is not None:
        logits = logits + bias_BHTS
    return jnp.where(mask_B1TS, logits, _MASKED)


def _products(q_BTHK: jax.Array, k_BHSK: jax.Array) -> jax.Array:
    """q k, (B, H, T, S), float32."""
    if q_BTHK.shape[1] == 1:  # XLA for CPU would copy the keys
        product = jnp.einsum("bhsk,bhk->bhs", k_BHSK, q_BTHK[:, 0], preferred_element_type=jnp.float32)
        return product[:, :, None]
    return jnp.einsum("bthk,bhsk->bhts", q_BTHK, k_BHSK, preferred_element_type=jnp.float32)


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
