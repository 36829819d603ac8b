"""Affine maps whose gradients compile well everywhere.

Shapes: ... leading dims (N when flattened: all tokens), D input dims, F output dims.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange


class Transposed(NamedTuple):
    """A matrix (D, F) that is kept as its transpose, which XLA for CPU multiplies a few rows with faster. No gradients."""

    w_FD: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix itself."""
        return self.w_FD.shape[::-1]


def matmul(x_D: jax.Array, w_DF: jax.Array | Transposed, out_dtype: jnp.dtype) -> jax.Array:
    """x w: (..., D), (D, F) -> (..., F) of `out_dtype`. The gradients' products are of x's dtype."""
    if isinstance(w_DF, Transposed):
        return jnp.einsum("...d,fd->...f", x_D, w_DF.w_FD, preferred_element_type=out_dtype)
    return _matmul(x_D, w_DF, out_dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _matmul(x_D: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jnp.matmul(x_D, w_DF, preferred_element_type=out_dtype)


def _matmul_forward(
    x_D: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x_D, w_DF, out_dtype), (x_D, w_DF)


def _matmul_backward(
    out_dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], dy_F: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_D, w_DF = saved
    dy_F = dy_F.astype(x_D.dtype)
    dx_D = jnp.einsum("...f,df->...d", dy_F, w_DF)
    tokens = rearrange(x_D, "... d -> (...) d"), rearrange(dy_F, "... f -> (...) f")
    dw_DF = jax.lax.platform_dependent(*tokens, cpu=_weight_gradient_cpu, default=_weight_gradient)
    return dx_D, dw_DF


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _weight_gradient(x_ND: jax.Array, dy_NF: jax.Array) -> jax.Array:
    return jnp.einsum("nd,nf->df", x_ND, dy_NF)


def _weight_gradient_cpu(x_ND: jax.Array, dy_NF: jax.Array) -> jax.Array:
    """The same with the smaller factor transposed first, and kept so: XLA for CPU is slow to contract over rows."""
    pin = jax.lax.optimization_barrier
    if x_ND.shape[1] <= dy_NF.shape[1]:
        return jnp.matmul(pin(x_ND.T), dy_NF)
    return pin(jnp.matmul(pin(dy_NF.T), x_ND)).T


@jax.custom_vjp
def add_bias(x_F: jax.Array, b_F: jax.Array) -> jax.Array:
    """x + b: (..., F), (F,) -> (..., F). The bias's gradient is a product with ones: a column sum is slow on CPU."""
    return x_F + b_F.astype(x_F.dtype)


def _add_bias_forward(x_F: jax.Array, b_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x_F, b_F), b_F


def _add_bias_backward(b_F: jax.Array, dy_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    dy_NF = rearrange(dy_F, "... f -> (...) f")
    ones_N = jnp.ones(len(dy_NF), dy_NF.dtype)
    db_F = jnp.matmul(ones_N, dy_NF, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    return dy_F, db_F.astype(b_F.dtype)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)
