"""The interface of the kernels of a platform for `grouped_matmul`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Arrays = tuple[jax.Array, ...]
# (rows or matrices, rows or matrices, sizes) -> products
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class ExpertsKernel(NamedTuple):
    """The products of one platform, each with one or several matrices of a group.

    N rows, E groups, D input dims, F output dims of a matrix; sizes (E,) int32.
    """

    # The rows of a product after the last group are undefined.
    # x (N, D), matrices (E, D, F), sizes -> (N, F) each; on a CPU a matrix may be the bits of x's dtype, uint16
    product: Callable[[jax.Array, Arrays, jax.Array], Arrays]
    # dy (N, F) of each matrix, matrices (E, D, F), sizes -> (N, D): the sum of their products
    product_transposed: Callable[[Arrays, Arrays, jax.Array], jax.Array]
    # x (N, D), dy (N, F) of each matrix, sizes -> (E, D, F) each; 0 for a group without rows
    weight_gradient: Callable[[jax.Array, Arrays, jax.Array], Arrays]


def each(product: Product) -> Callable[[jax.Array, Arrays, jax.Array], Arrays]:
    """`product` of the first argument and each of the second."""
    return lambda x, others, sizes_E: tuple(product(x, other, sizes_E) for other in others)


def summed(product: Product) -> Callable[[Arrays, Arrays, jax.Array], jax.Array]:
    """The sum of `product` of each pair."""

    def run(xs: Arrays, others: Arrays, sizes_E: jax.Array) -> jax.Array:
        products = (product(x, other, sizes_E) for x, other in zip(xs, others, strict=True))
        return functools.reduce(operator.add, products)

    return run


def zeros(shape: tuple[int, ...], like: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Zeros that vary over the devices of a `shard_map` as `like` does, as the first values of a loop must."""
    axes = tuple(sorted(jax.typeof(like).manual_axis_type.varying))
    made = jnp.zeros(shape, dtype or like.dtype)
    return jax.lax.pcast(made, axes, to="varying") if axes else made


def live(x_NF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x with zeros in the rows after the last group."""
    rows = jax.lax.broadcasted_iota(jnp.int32, x_NF.shape, 0)
    return jnp.where(rows < sizes_E.sum(), x_NF, 0)
