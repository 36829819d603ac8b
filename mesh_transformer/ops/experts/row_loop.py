"""`grouped_matmul` on a CPU: a loop over the groups that have rows, and in it a loop over blocks of their rows.

The work is that of the rows, and a group without rows costs nothing. The blocks of a group begin at its first row, so
that the layout has no padding. A block may go on into the rows of the next group: these are computed again later.

XLA for CPU multiplies bfloat16 in float32, and converts the matrices of all groups before the loop. It does not convert
integers: the matrices may be given as uint16, and then a group without rows costs nothing in bfloat16 either.

Shapes: N rows, E groups, D input dims, F output dims, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from mesh_transformer.ops.experts.kernel import Kernel, live, zeros

# R at most and at least, and the rows that a gradient of a matrix multiplies at a time
_MOST, _LEAST, GRADIENT_ROWS = 16, 4, 32


def block_rows(n: int, groups: int) -> int:
    """R for `n` rows: blocks of groups with few rows, as in decoding, would have few rows too."""
    return min(n, _MOST if n > _LEAST * groups else _LEAST)


def _product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _products(x_ND, w_EDF, sizes_E, w_EDF.shape[2], (((1,), (0,)), ((), ())))


def _product_transposed(dy_NF: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _products(dy_NF, w_EDF, sizes_E, w_EDF.shape[1], (((1,), (1,)), ((), ())))


def _products(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, width: int, dims: tuple) -> jax.Array:
    rows = block_rows(len(x_ND), len(sizes_E))
    x_padded = jnp.pad(x_ND, ((0, rows), (0, 0)))

    def group(number: jax.Array, start: jax.Array, size: jax.Array, y: jax.Array) -> jax.Array:
        w = jax.lax.dynamic_index_in_dim(w_EDF, number, keepdims=False)
        w = (jax.lax.bitcast_convert_type(w, x_ND.dtype) if w.dtype == jnp.uint16 else w).astype(jnp.float32)

        def block(i: jax.Array, y: jax.Array) -> jax.Array:
            at = start + i * rows
            x = jax.lax.dynamic_slice_in_dim(x_padded, at, rows).astype(jnp.float32)
            product = jax.lax.dot_general(x, w, dims).astype(y.dtype)
            return jax.lax.dynamic_update_slice_in_dim(y, product, at, axis=0)

        return jax.lax.fori_loop(0, -(-size // rows), block, y)

    y = _each_group(sizes_E, group, zeros((len(x_padded), width), x_ND))
    return y[: len(x_ND)]


def weight_gradient(x_ND: jax.Array, dy_NF: jax.Array, sizes_E: jax.Array, *, rows: int = GRADIENT_ROWS) -> jax.Array:
    """See `Kernel`. The products of blocks of at most `rows` rows are summed in float32."""
    rows = min(rows, len(x_ND))
    x_padded, dy_padded = (jnp.pad(x, ((0, rows), (0, 0))) for x in (x_ND, dy_NF))
    shape = x_ND.shape[1], dy_NF.shape[1]

    def group(number: jax.Array, start: jax.Array, size: jax.Array, dw_EDF: jax.Array) -> jax.Array:
        def block(i: jax.Array, dw_DF: jax.Array) -> jax.Array:
            x = live(jax.lax.dynamic_slice_in_dim(x_padded, start + i * rows, rows), (size - i * rows)[None])
            dy = jax.lax.dynamic_slice_in_dim(dy_padded, start + i * rows, rows)
            return dw_DF + jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)

        dw_DF = jax.lax.fori_loop(0, -(-size // rows), block, zeros(shape, x_ND, jnp.float32))
        return jax.lax.dynamic_update_index_in_dim(dw_EDF, dw_DF.astype(x_ND.dtype), number, 0)

    return _each_group(sizes_E, group, zeros((len(sizes_E), *shape), x_ND))


def _each_group(sizes_E: jax.Array, function: Callable[..., jax.Array], carry: jax.Array) -> jax.Array:
    """`carry = function(number, first row, rows, carry)` for each group that has rows, in ascending order."""
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    numbers_E = jnp.argsort(sizes_E == 0, stable=True)

    def step(i: jax.Array, carry: jax.Array) -> jax.Array:
        number = numbers_E[i]
        return function(number, starts_E[number], sizes_E[number], carry)

    return jax.lax.fori_loop(0, (sizes_E > 0).sum(), step, carry)


KERNEL = Kernel(_product, _product_transposed, weight_gradient)
