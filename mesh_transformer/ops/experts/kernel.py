"""What a platform computes for `grouped_matmul`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Kernel(NamedTuple):
    """The products of one platform. N rows, E groups, D input dims, F output dims; sizes (E,) int32."""

    # The rows of a product after the last group are any numbers.
    # x (N, D), w (E, D, F), sizes -> (N, F); on a CPU w may be the bits of x's dtype, uint16
    product: Product
    # dy (N, F), w (E, D, F), sizes -> (N, D)
    product_transposed: Product
    # x (N, D), dy (N, F), sizes -> (E, D, F); 0 for a group without rows
    weight_gradient: Product


def zeros(shape: tuple[int, ...], like: jax.Array, dtype: jnp.dtype | None = None) -> jax.Array:
    """Zeros that vary over the devices of a `shard_map` as `like` does, as the first values of a loop must."""
    axes = tuple(sorted(jax.typeof(like).manual_axis_type.varying))
    made = jnp.zeros(shape, dtype or like.dtype)
    return jax.lax.pcast(made, axes, to="varying") if axes else made


def live(x_NF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """x with zeros in the rows after the last group."""
    rows = jax.lax.broadcasted_iota(jnp.int32, x_NF.shape, 0)
    return jnp.where(rows < sizes_E.sum(), x_NF, 0)
