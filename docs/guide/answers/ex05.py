"""Our answers to the exercises of chapter 5."""

import jax
import jax.numpy as jnp


def relative_error(n: int) -> float:
    """The right result has the variance n v, if a summand has v. The error is the other n - 1 summands."""
    return ((n - 1) / n) ** 0.5


def order_columns(w_qkv: jax.Array, heads: int, n: int) -> jax.Array:
    """Columns as (which of q, k, v; device; the rest), then the device first."""
    parts = w_qkv.reshape(w_qkv.shape[0], 3, n, -1)
    return jnp.swapaxes(parts, 1, 2).reshape(w_qkv.shape)


def scatter_ring(x: jax.Array, w: jax.Array, axis: str, n: int) -> jax.Array:
    """In step s, device i adds to the sum of the device i - 1 - s, which arrives at home in the last step."""
    me, size = jax.lax.axis_index(axis), x.shape[0] // n
    to_next = [(i, (i + 1) % n) for i in range(n)]
    total = None
    for step in range(n):
        owner = (me - 1 - step) % n
        product = jax.lax.dynamic_slice_in_dim(x, owner * size, size) @ w
        total = product if total is None else jax.lax.ppermute(total, axis, to_next) + product
    return total
