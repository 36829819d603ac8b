"""Exercises of chapter 5, tensor parallelism. Fill in the functions, then run: python scripts/guide.py check 5"""

import jax


def relative_error(n: int) -> float:
    """Remove the psum: by how much is it wrong?

    Someone forgot the `psum` at the end of the feed-forward network, and switched the check of `shard_map` off. Each of
    n devices now takes its own summand H_i W_out,i for the result. The elements of W_out are independent and have mean
    0. Return the size of the error (this summand minus the right result), divided by the size of the right result. Size
    is the root of the mean square.

    Hint: the right result is a sum of n summands of equal size, which are not correlated.
    """
    raise NotImplementedError


def order_columns(w_qkv: jax.Array, heads: int, n: int) -> jax.Array:
    """Split a fused matrix of queries, keys and values.

    `w_qkv` (D, 3 * heads * K) has all columns of queries first, then those of keys, then those of values. In each third
    the heads follow one another, with K columns each. `shard_map` with P(None, "tp") gives device i the i-th of n equal
    blocks of columns. Such a block does not have the queries, keys and values of the same heads. Return the matrix with
    its columns in a different order: block i has the queries, then the keys, then the values of the i-th of n equal
    groups of heads. n divides `heads`.
    """
    raise NotImplementedError


def scatter_ring(x: jax.Array, w: jax.Array, axis: str, n: int) -> jax.Array:
    """Write the ring of the product by rows.

    It runs inside a `shard_map` on each of n devices of the mesh axis `axis`. x (T, F / n) are a device's columns of
    the activation, w (F / n, D) its rows of the matrix. Return the sum over all devices of x w at this device's own
    positions, (T / n, D). Device i owns T / n positions, from i T / n on.

    Use `jax.lax.ppermute` and no other collective, n - 1 times. In each step, multiply T / n positions.

    Hint: let the sum travel. It starts at device owner + 1, and goes from i to i + 1 once around. Each device adds its
    product for the owner's positions. At which positions does device i work in step 0? In the last step?
    """
    raise NotImplementedError
