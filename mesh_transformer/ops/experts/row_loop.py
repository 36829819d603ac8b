"""`grouped_matmul` on a CPU: a loop over the groups that have rows, and in it a loop over blocks of their rows.

The work grows with the rows (`gradient_rows` has the exception), and a group without rows costs nothing. The
blocks of a group begin at its first row, so that the layout has no padding. A block may go on into the rows of the next
group: these are computed again later.

Several matrices are multiplied as one: XLA for CPU computes a product on several cores if it is wide.

XLA for CPU multiplies bfloat16 in float32, and converts the matrices of all groups before the loop. It does not convert
integers: the matrices may be given as uint16, and then a group without rows costs nothing in bfloat16 either.

Shapes: N rows, E groups, D input dims, F output dims of a matrix, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.ops.experts.kernel import Arrays, ExpertsKernel, zeros

# R at most and at least, and where groups have few rows; R at least of the gradient of a matrix
_MOST, _LEAST, _FEW, _GRADIENT_LEAST = 128, 16, 4, 32

Carry = TypeVar("Carry")


def block_rows(n: int, groups: int) -> int:
    """R for `n` rows. The last block of a group is half empty on average: R is a quarter of the mean rows of a
    group."""
    if n <= _FEW * groups:
        return min(n, _FEW)
    return min(n, max(_LEAST, min(n // groups // 4, _MOST)))


def gradient_rows(n: int, groups: int, *, least: int = _GRADIENT_LEAST) -> tuple[int, int]:
    """The rows of the first block of a group, and the rows of each later block, for the gradient of a matrix.

    Each block but the first costs a sum. The first has about the mean rows of a group, and at least as many as a later
    block. Where a few groups have most rows, the first blocks of the other groups double the rows that are multiplied.
    """
    rows = min(n, max(least, block_rows(n, groups)))
    return rows * max(1, n // groups // max(rows, 1)), rows


def _product(x_ND: jax.Array, w_EDF: Arrays, sizes_E: jax.Array) -> Arrays:
    return _products((x_ND,), w_EDF, sizes_E, [w.shape[2] for w in w_EDF], contracted=0)


def _product_transposed(dy_NF: Arrays, w_EDF: Arrays, sizes_E: jax.Array) -> jax.Array:
    return _products(dy_NF, w_EDF, sizes_E, [w_EDF[0].shape[1]], contracted=1)[0]


def _products(xs: Arrays, w_EDF: Arrays, sizes_E: jax.Array, widths: Sequence[int], *, contracted: int) -> Arrays:
    """The joined xs times the joined matrices of their group, summed over dimension `contracted` of the matrices:
    arrays of `widths`."""
    n, dtype = len(xs[0]), xs[0].dtype
    rows = block_rows(n, len(sizes_E))

    def group(number: jax.Array, start: jax.Array, size: jax.Array, ys: Arrays) -> Arrays:
        w = jnp.concatenate([_matrix(w, number, dtype) for w in w_EDF], axis=1)

        def block(i: jax.Array, ys: Arrays) -> Arrays:
            # the last block of all rows begins earlier, and keeps the rows of the groups before
            at = jnp.minimum(start + i * rows, n - rows)
            x = _joined(xs, at, rows).astype(jnp.float32)
            product = jax.lax.dot_general(x, w, (((1,), (contracted,)), ((), ()))).astype(dtype)
            in_group = (at + jnp.arange(rows) >= start)[:, None]
            new, old = _split(product, widths), _slices(ys, at, rows)
            return _put(ys, [jnp.where(in_group, *pair) for pair in zip(new, old, strict=True)], at)

        return jax.lax.fori_loop(0, -(-size // rows), block, ys)

    return _each_group(sizes_E, group, tuple(zeros((n, width), xs[0]) for width in widths))


def weight_gradient(x_ND: jax.Array, dy_NF: Arrays, sizes_E: jax.Array, *, least: int = _GRADIENT_LEAST) -> Arrays:
    """See `ExpertsKernel`. The products of blocks, of at least `least` rows, are summed in float32."""
    first, rows = gradient_rows(len(x_ND), len(sizes_E), least=least)
    widths = [dy.shape[1] for dy in dy_NF]

    def group(number: jax.Array, start: jax.Array, size: jax.Array, dw_EDF: Arrays) -> Arrays:
        def product(begin: jax.Array, rows: int) -> jax.Array:
            at = jnp.minimum(begin, len(x_ND) - rows)
            row_R = at + jnp.arange(rows)
            mask = ((row_R >= begin) & (row_R < start + size))[:, None]
            x = jnp.where(mask, jax.lax.dynamic_slice_in_dim(x_ND, at, rows), 0)
            return jnp.matmul(x.T, _joined(dy_NF, at, rows), preferred_element_type=jnp.float32)

        def block(i: jax.Array, dw_DF: jax.Array) -> jax.Array:
            return dw_DF + product(start + first + i * rows, rows)

        more = jnp.maximum(-((first - size) // rows), 0)
        dw_DF = jax.lax.fori_loop(0, more, block, product(start, first))
        return _put(dw_EDF, [part[None] for part in _split(dw_DF.astype(x_ND.dtype), widths)], number)

    none = tuple(zeros((len(sizes_E), x_ND.shape[1], width), x_ND) for width in widths)
    return _each_group(sizes_E, group, none)


def _matrix(w_EDF: jax.Array, number: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The matrix of a group in float32, of numbers or bits of `dtype`."""
    w = jax.lax.dynamic_index_in_dim(w_EDF, number, keepdims=False)
    return (jax.lax.bitcast_convert_type(w, dtype) if w.dtype == jnp.uint16 else w).astype(jnp.float32)


def _slices(xs: Arrays, at: jax.Array, rows: int) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, at, rows) for x in xs]


def _joined(xs: Arrays, at: jax.Array, rows: int) -> jax.Array:
    """`rows` rows of xs side by side, from row `at`."""
    return jnp.concatenate(_slices(xs, at, rows), axis=1)


def _split(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    return jnp.split(x, np.cumsum(widths)[:-1].tolist(), axis=1)


def _put(arrays: Arrays, parts: Sequence[jax.Array], at: jax.Array) -> Arrays:
    """The arrays with the parts in their first dimension from `at`."""
    pairs = zip(arrays, parts, strict=True)
    return tuple(jax.lax.dynamic_update_slice_in_dim(array, part, at, axis=0) for array, part in pairs)


def _each_group(sizes_E: jax.Array, function: Callable[..., Carry], carry: Carry) -> Carry:
    """`carry = function(number, first row, rows, carry)` for each group that has rows, in ascending order."""
    starts_E = jnp.cumsum(sizes_E) - sizes_E
    numbers_E = jnp.argsort(sizes_E == 0, stable=True)

    def step(i: jax.Array, carry: Carry) -> Carry:
        number = numbers_E[i]
        return function(number, starts_E[number], sizes_E[number], carry)

    return jax.lax.fori_loop(0, (sizes_E > 0).sum(), step, carry)


KERNEL = ExpertsKernel(_product, _product_transposed, weight_gradient)
