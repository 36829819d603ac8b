"""One block of a ring: the attention of a chunk of queries to a chunk of keys of some device, which adds to the softmax
of the queries; and its gradients.

Shapes: B sequences, J heads of keys and values, G queries that share keys, K dims of a head, C query positions and S
key positions of a chunk, T all positions.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer.ops.attend import splash
from mesh_transformer.ops.attend.causal import MASKED, sees, soft_capped


class Queries(NamedTuple):
    """A chunk of queries."""

    q_BCJGK: jax.Array
    positions_C: jax.Array
    segments_BC: jax.Array | None
    # all columns
    bias_BJGCT: jax.Array | None


class Backward(NamedTuple):
    """A chunk of queries, the gradient of their output, and the arrays that the forward pass saved."""

    query: Queries
    dy_BCJGK: jax.Array
    log_z_BJGC: jax.Array
    # the sum over K of output and gradient
    delta_BJGC: jax.Array
    # the output; None if the blocks do not need it
    mixed_BCJGK: jax.Array | None


class Keys(NamedTuple):
    """A chunk of keys whose device is known."""

    k_BSJK: jax.Array
    v_BSJK: jax.Array
    segments_BS: jax.Array | None
    positions_S: jax.Array
    # the first column of the bias
    column: jax.Array


class Softmax(NamedTuple):
    """The softmax of a chunk of queries over the keys so far, float32."""

    numerator_BJGCK: jax.Array
    largest_BJGC: jax.Array
    total_BJGC: jax.Array


class QueryGradients(NamedTuple):
    """The gradients of a chunk of queries and of the bias, float32."""

    dq_BCJGK: jax.Array
    dbias_BJGCT: jax.Array | None


class KeyGradients(NamedTuple):
    """The gradients of a chunk of keys and values, float32."""

    dk_BSJK: jax.Array
    dv_BSJK: jax.Array


Gradients = tuple[QueryGradients, KeyGradients]


class RingBlocks(Protocol):
    """The computation of a block."""

    def forward(self, query: Queries, key: Keys, masked: bool, softmax: Softmax) -> Softmax:
        """The softmax over these keys too.

        Args:
            masked: whether some keys are later than some queries. `Splash` then assumes that keys and queries have the
                same positions. Without a mask, a query sees all keys of its window and segment.
        """

    def backward(
        self, rows: Backward, key: Keys, masked: bool, dquery: QueryGradients, dkey: KeyGradients
    ) -> Gradients:
        """The gradients, with the gradients of this block added."""


@dataclasses.dataclass(frozen=True)
class Plain:
    """Blocks as XLA compiles them."""

    scale: float
    softcap: float | None
    window: jax.Array | None

    def forward(self, query: Queries, key: Keys, masked: bool, softmax: Softmax) -> Softmax:
        """See `RingBlocks`."""
        logits = self._logits(query, key, self._products(query, key), masked)
        largest = jnp.maximum(softmax.largest_BJGC, logits.max(-1))
        exps, rescale = jnp.exp(logits - largest[..., None]), jnp.exp(softmax.largest_BJGC - largest)
        mixed = _product("bjgcs,bsjk->bjgck", exps.astype(key.v_BSJK.dtype), key.v_BSJK)
        numerator = softmax.numerator_BJGCK * rescale[..., None] + mixed
        return Softmax(numerator, largest, softmax.total_BJGC * rescale + exps.sum(-1))

    def backward(
        self, rows: Backward, key: Keys, masked: bool, dquery: QueryGradients, dkey: KeyGradients
    ) -> Gradients:
        """See `RingBlocks`."""
        query, dtype = rows.query, rows.query.q_BCJGK.dtype
        products = self._products(query, key)
        logits = self._logits(query, key, products, masked)
        weights = jnp.exp(logits - rows.log_z_BJGC[..., None])
        dweights = _product("bcjgk,bsjk->bjgcs", rows.dy_BCJGK, key.v_BSJK)
        dlogits = weights * (dweights - rows.delta_BJGC[..., None])
        dbias = _add_columns(dquery.dbias_BJGCT, key.column, dlogits)
        if self.softcap is not None:
            dlogits = dlogits * (1 - jnp.square(products / self.softcap))
        dlogits = (dlogits / np.float32(1 / self.scale)).astype(dtype)
        dq = dquery.dq_BCJGK + _product("bjgcs,bsjk->bcjgk", dlogits, key.k_BSJK)
        dk = dkey.dk_BSJK + _product("bjgcs,bcjgk->bsjk", dlogits, query.q_BCJGK)
        dv = dkey.dv_BSJK + _product("bjgcs,bcjgk->bsjk", weights.astype(dtype), rows.dy_BCJGK)
        return QueryGradients(dq, dbias), KeyGradients(dk, dv)

    def _products(self, query: Queries, key: Keys) -> jax.Array:
        """scale q k, with the soft cap, (B, J, G, C, S) float32."""
        # a division, as in `attention_logits`
        products = _product("bcjgk,bsjk->bjgcs", query.q_BCJGK, key.k_BSJK) / np.float32(1 / self.scale)
        return products if self.softcap is None else soft_capped(products, self.softcap)

    def _logits(self, query: Queries, key: Keys, products: jax.Array, masked: bool) -> jax.Array:
        """The products with the bias, where a query sees a key."""
        if query.bias_BJGCT is not None:
            size = key.k_BSJK.shape[1]
            products = products + jax.lax.dynamic_slice_in_dim(query.bias_BJGCT, key.column, size, 4).astype(
                jnp.float32
            )
        if masked or self.window is not None:
            seen = sees(query.positions_C[None], key.positions_S[None], self.window)[:, None, None]
            products = jnp.where(seen, products, MASKED)
        if query.segments_BC is not None and key.segments_BS is not None:
            same = (query.segments_BC[:, :, None] == key.segments_BS[:, None])[:, None, None]
            products = jnp.where(same, products, MASKED)
        return products


@dataclasses.dataclass(frozen=True)
class Splash:
    """Blocks by the splash kernel. There is no bias and no window."""

    kernels: splash.SplashBlocks

    def forward(self, query: Queries, key: Keys, masked: bool, softmax: Softmax) -> Softmax:
        """See `RingBlocks`."""
        mixed, log_z = self.kernels.forward(*self._arguments(query, key, masked))
        mixed = rearrange(mixed, "b c (j g) k -> b j g c k", j=key.k_BSJK.shape[2]).astype(jnp.float32)
        log_z = rearrange(log_z, "b (j g) c -> b j g c", j=key.k_BSJK.shape[2])
        largest = jnp.maximum(softmax.largest_BJGC, log_z)
        weight, rescale = jnp.exp(log_z - largest), jnp.exp(softmax.largest_BJGC - largest)
        numerator = softmax.numerator_BJGCK * rescale[..., None] + mixed * weight[..., None]
        return Softmax(numerator, largest, softmax.total_BJGC * rescale + weight)

    def backward(
        self, rows: Backward, key: Keys, masked: bool, dquery: QueryGradients, dkey: KeyGradients
    ) -> Gradients:
        """See `RingBlocks`."""
        assert rows.mixed_BCJGK is not None
        log_z = rearrange(rows.log_z_BJGC, "b j g c -> b (j g) c")
        arguments = self._arguments(rows.query, key, masked)
        dq, dk, dv = self.kernels.backward(*arguments, _joined(rows.mixed_BCJGK), log_z, _joined(rows.dy_BCJGK))
        dq = rearrange(dq, "b c (j g) k -> b c j g k", j=key.k_BSJK.shape[2])
        dq, dk, dv = (x.astype(jnp.float32) for x in (dq, dk, dv))
        return QueryGradients(dquery.dq_BCJGK + dq, None), KeyGradients(dkey.dk_BSJK + dk, dkey.dv_BSJK + dv)

    def _arguments(
        self, query: Queries, key: Keys, masked: bool
    ) -> tuple[splash.Mask, None, jax.Array, jax.Array, jax.Array, splash.Segments]:
        ids = None
        if query.segments_BC is not None and key.segments_BS is not None:
            ids = query.segments_BC, key.segments_BS
        return "causal" if masked else "full", None, _joined(query.q_BCJGK), key.k_BSJK, key.v_BSJK, ids


def _joined(x_BCJGK: jax.Array) -> jax.Array:
    return rearrange(x_BCJGK, "b c j g k -> b c (j g) k")


def _product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _add_columns(total_BJGCT: jax.Array | None, column: jax.Array, dlogits_BJGCS: jax.Array) -> jax.Array | None:
    """The bias's gradient plus the sum over sequences of `dlogits`, whose first column is `column`."""
    if total_BJGCT is None:
        return None
    old = jax.lax.dynamic_slice_in_dim(total_BJGCT, column, dlogits_BJGCS.shape[4], 4)
    new = old + dlogits_BJGCS.sum(0, keepdims=True)
    return jax.lax.dynamic_update_slice_in_dim(total_BJGCT, new, column, 4)
