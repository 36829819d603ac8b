"""Attention of whole sequences to themselves, and the logits that every kind of attention computes.

Shapes: B sequences, T query positions, S key positions, H heads, J heads of keys and values (a divisor of H), K dims of
a head, V dims of a head of values. Inside, the G = H / J queries that share keys are rows: T is then G times the query
positions, and H is J.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from mesh_transformer.ops.attend import kernels
from mesh_transformer.ops.attend.kernel import Windows
from mesh_transformer.parallel.sharding import active

# Queries of a part. Shorter parts cost more in small operations than they save.
_SHORTEST_PART = 64
# The name of the operations that a fused kernel of attention would replace, in the op_name of compiled programs.
ATTEND = "attend"
# A logit. It is finite, so that a query that sees no key gives a mean, not NaN.
MASKED = -1e10


class Attend(Protocol):
    """Attention of one layer. A block calls it once, with the queries, keys and values of its positions.

    With a cache of latents, latent attention calls `cached.Cached.hold` and `cached.Cached.attend` instead.
    """

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
        """softmax(scale q k + bias) v over the keys that each query sees: (B, T, H, V) of q's dtype; softmax in
        float32.

        Args:
            window: number of keys that a query sees, the last of them at its own position; None for all up to its own.
            softcap: the scaled products pass through `soft_capped`.
        """


@dataclasses.dataclass(frozen=True)
class Causal:
    """An `Attend` of whole sequences to themselves; their positions count up from 0."""

    view: ClassVar = None
    bias_BHTS: jax.Array | None = None  # B is 1
    segments_BT: jax.Array | None = None  # int32: a query sees the keys of its own segment only; None for one segment
    windows: Windows | None = None  # the possible values of a traced window; None if they are unknown

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
        """See `Attend`. A kernel computes it where `ops.attend.kernels` chooses one.

        Else the queries are computed in up to four parts, each with the keys up to its last query. Four parts compute
        5/8 of the products and of the softmax. The backward pass keeps only the softmax weights, in q's dtype.
        """
        arrays = q_BTHK, k_BTJK, v_BTJV, self.bias_BHTS, self.segments_BT
        with jax.named_scope(ATTEND):
            partition = active()
            if partition is not None and partition.attention != kernels.PLAIN:
                fused = kernels.attend(
                    partition, *arrays, scale=scale, window=window, softcap=softcap, windows=self.windows
                )
                if fused is not None:
                    return fused
            # the derivative of the soft cap needs more than the softmax weights
            if softcap is None:
                mixed = _attend(scale, *arrays, window)
            else:
                mixed, _ = _forward(scale, *arrays, window, softcap=softcap)
        # the policies of compute.remat refer to the output of attention by this name
        return checkpoint_name(mixed, "attn_out")


_Saved = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, list[jax.Array]]
"""Queries, keys, values, bias, and the softmax weights of each part of the queries."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    scale: float,
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJK: jax.Array,
    bias_BHTS: jax.Array | None,
    segments_BT: jax.Array | None,
    window: jax.Array | int | None,
) -> jax.Array:
    return _forward(scale, q_BTHK, k_BTJK, v_BTJK, bias_BHTS, segments_BT, window)[0]


def _forward(
    scale: float,
    q_BTHK: jax.Array,
    k_BTJK: jax.Array,
    v_BTJK: jax.Array,
    bias_BHTS: jax.Array | None,
    segments_BT: jax.Array | None,
    window: jax.Array | int | None,
    softcap: float | None = None,
) -> tuple[jax.Array, _Saved]:
    k_BHSK, v_BHSK = (rearrange(x, "b s h k -> b h s k") for x in (k_BTJK, v_BTJK))
    shared = q_BTHK.shape[2] // k_BTJK.shape[2]
    mixed, kept = [], []
    for rows in parts(q_BTHK.shape[1]):
        keys = slice(rows.stop)
        mask_B1TS = causal_mask(jnp.arange(rows.start, rows.stop)[None], rows.stop, window)
        if segments_BT is not None:
            mask_B1TS = mask_B1TS & (segments_BT[:, rows, None] == segments_BT[:, None, keys])[:, None]
        bias = None if bias_BHTS is None else bias_BHTS[:, :, rows, keys]
        q = fold_heads(q_BTHK[:, rows], shared)
        logits = attention_logits(q, [k_BHSK[:, :, keys]], mask_B1TS, bias, scale, softcap)
        kept.append(jax.nn.softmax(logits, axis=-1).astype(q_BTHK.dtype))
        mixed.append(unfold_heads(jnp.einsum("bhts,bhsk->bthk", kept[-1], v_BHSK[:, :, keys]), shared))
    return jnp.concatenate(mixed, axis=1), (q_BTHK, k_BHSK, v_BHSK, bias_BHTS, kept)


def _backward(scale: float, saved: _Saved, dy_BTHK: jax.Array) -> tuple[jax.Array | None, ...]:
    """The gradients of y = w v with w = softmax(l) and l = scale q k + bias.

    dv = w^T dy,  dw = dy v^T,  dl = w * (dw - sum over keys of w * dw),
    dbias = sum over sequences of dl,  dq = scale dl k,  dk = scale dl^T q.
    """
    q_BTHK, k_BHSK, v_BHSK, bias_BHTS, kept = saved
    shared = q_BTHK.shape[2] // k_BHSK.shape[1]
    dq, dk_BHSK, dv_BHSK = [], [], []
    dbias = None if bias_BHTS is None else jnp.zeros(bias_BHTS.shape, jnp.float32)
    for rows, weights in zip(parts(q_BTHK.shape[1]), kept, strict=True):
        keys, dy, q = slice(rows.stop), fold_heads(dy_BTHK[:, rows], shared), fold_heads(q_BTHK[:, rows], shared)
        dweights = jnp.einsum("bthk,bhsk->bhts", dy, v_BHSK[:, :, keys], preferred_element_type=jnp.float32)
        weights32 = weights.astype(jnp.float32)
        dlogits = weights32 * (dweights - (weights32 * dweights).sum(-1, keepdims=True))
        if dbias is not None:
            dbias = dbias.at[:, :, rows, keys].set(dlogits.sum(0, keepdims=True))
        dlogits = (dlogits / np.float32(1 / scale)).astype(q.dtype)
        dq.append(unfold_heads(jnp.einsum("bhts,bhsk->bthk", dlogits, k_BHSK[:, :, keys]), shared))
        part_dk = jnp.einsum("bhts,bthk->bhsk", dlogits, q)
        part_dv = jnp.einsum("bhts,bthk->bhsk", weights, dy)
        dk_BHSK.append(part_dk.astype(jnp.float32))
        dv_BHSK.append(part_dv.astype(jnp.float32))
    dk, dv = (functools.reduce(_with_more_keys, gradients) for gradients in (dk_BHSK, dv_BHSK))
    dk, dv = (rearrange(x, "b h s k -> b s h k").astype(dy_BTHK.dtype) for x in (dk, dv))
    if bias_BHTS is not None and dbias is not None:
        dbias = dbias.astype(bias_BHTS.dtype)
    return jnp.concatenate(dq, axis=1), dk, dv, dbias, None, None


def _with_more_keys(total_BHSK: jax.Array, part_BHSK: jax.Array) -> jax.Array:
    """Add a gradient of the first keys to a gradient of more keys.

    Not by an addition in place: inside a `shard_map` the partitioner gathers the heads and sequences for it.
    """
    n = total_BHSK.shape[2]
    return jnp.concatenate([total_BHSK + part_BHSK[:, :, :n], part_BHSK[:, :, n:]], axis=2)


_attend.defvjp(_forward, _backward)


def fold_heads(x_BTHK: jax.Array, shared: int) -> jax.Array:
    """Heads (J G) with G = `shared` to rows: (B, T, J G, K) -> (B, G T, J, K).

    Devices may split the heads that share one head of keys: they then split G, which must be the outer part of the
    rows.
    """
    return x_BTHK if shared == 1 else rearrange(x_BTHK, "b t (j g) k -> b (g t) j k", g=shared)


def unfold_heads(x_BTHK: jax.Array, shared: int) -> jax.Array:
    """The inverse of `fold_heads`."""
    return x_BTHK if shared == 1 else rearrange(x_BTHK, "b (g t) j k -> b t (j g) k", g=shared)


def soft_capped(x: jax.Array, softcap: float) -> jax.Array:
    """softcap * tanh(x / softcap) (Gemma 2, arXiv:2408.00118)."""
    return softcap * jnp.tanh(x / softcap)


def parts(length: int) -> list[slice]:
    """Up to four consecutive parts of `length` queries, all of one size."""
    count = next(n for n in (4, 3, 2, 1) if n == 1 or length % (n * _SHORTEST_PART) == 0)
    size = length // count
    return [slice(start, start + size) for start in range(0, length, size)]


def causal_mask(positions_BT: jax.Array, n_keys: int, window: jax.Array | int | None = None) -> jax.Array:
    """(B, 1, T, S) booleans: whether a query at `positions_BT` sees each of the keys 0 .. n_keys - 1. See `sees`."""
    return sees(positions_BT, jnp.arange(n_keys)[None], window)[:, None]


def sees(positions_BT: jax.Array, keys_BS: jax.Array, window: jax.Array | int | None = None) -> jax.Array:
    """(B, T, S) booleans: whether a query sees a key: at most `window` - 1 positions before its own, and none after
    it."""
    distance_BTS = positions_BT[:, :, None] - keys_BS[:, None]
    seen = distance_BTS >= 0
    return seen if window is None else seen & (distance_BTS < window)


def attention_logits(
    q_BTHK: jax.Array,
    keys: Sequence[jax.Array],
    mask_B1TS: jax.Array,
    bias_BHTS: jax.Array | None,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """scale q k + bias where a query sees a key: (B, H, T, S) float32.

    Args:
        keys: consecutive parts of (B, H, S, K).
        mask_B1TS: for the query positions alone; T has them G times.
    """
    shared = q_BTHK.shape[1] // mask_B1TS.shape[2]
    if shared > 1:
        mask_B1TS = jnp.tile(mask_B1TS, (1, 1, shared, 1))
    products = [_products(q_BTHK, k_BHSK) for k_BHSK in keys]
    # A division, as in the original: the product with a rounded 1 / sqrt(K) differs in the last bit.
    logits = jnp.concatenate(products, axis=-1) / np.float32(1 / scale)
    if softcap is not None:
        logits = soft_capped(logits, softcap)
    if bias_BHTS is not None:
        logits = logits + bias_BHTS.astype(logits.dtype)
    return jnp.where(mask_B1TS, logits, MASKED)


def _products(q_BTHK: jax.Array, k_BHSK: jax.Array) -> jax.Array:
    """q k, (B, H, T, S), float32."""
    if q_BTHK.shape[1] == 1:
        # in the other form XLA for CPU copies the keys
        product = jnp.einsum("bhsk,bhk->bhs", k_BHSK, q_BTHK[:, 0], preferred_element_type=jnp.float32)
        return product[:, :, None]
    return jnp.einsum("bthk,bhsk->bhts", q_BTHK, k_BHSK, preferred_element_type=jnp.float32)
