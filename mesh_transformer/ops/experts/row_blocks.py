"""`grouped_matmul` on a GPU: batched products of blocks of rows, each with a copy of its group's matrix.

The blocks are computed in parts, so that few copies exist at a time. A part of blocks without rows is not computed.

Shapes: N rows, E groups, D input dims, F output dims, C blocks of a part, R rows of a block.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.ops.experts import row_loop
from mesh_transformer.ops.experts.kernel import ExpertsKernel, each, summed, zeros

# bytes of the matrices' copies
_COPIES = 1 << 27
# R at most, and R at least of the gradient of a matrix
_ROWS, _GRADIENT_ROWS = 256, 512


def _product(x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, transposed: bool = False) -> jax.Array:
    n, groups = len(x_ND), len(sizes_E)
    rows = min(_ROWS, max(16, n // groups))
    blocks = n // rows + groups
    part = min(blocks, max(1, _COPIES // w_EDF[0].nbytes))
    parts = -(-blocks // part)
    ends_E, last_E = jnp.cumsum(sizes_E), jnp.cumsum(-(-sizes_E // rows))
    # the row of x at which the blocks of a group begin, less the rows of the blocks before
    shift_E = ends_E - sizes_E - (last_E + -sizes_E // rows) * rows

    def compute(i: jax.Array, y: jax.Array) -> jax.Array:
        block_C = i * part + jnp.arange(part)
        group_C = _group(block_C, last_E)
        row_CR = (block_C * rows + shift_E[group_C])[:, None] + jnp.arange(rows)[None]
        row_CR = jnp.where(row_CR < ends_E[group_C][:, None], row_CR, n)
        x_CRD = x_ND.at[row_CR].get(mode="fill", fill_value=0)
        dims = ((2,), (2 if transposed else 1,)), ((0,), (0,))
        y_CRF = jax.lax.dot_general(x_CRD, w_EDF[group_C], dims, preferred_element_type=x_ND.dtype)
        return jax.lax.dynamic_update_slice_in_dim(y, rearrange(y_CRF, "c r f -> (c r) f"), i * part * rows, axis=0)

    width = w_EDF.shape[1 if transposed else 2]
    y = jax.lax.fori_loop(0, -(-last_E[-1] // part), compute, zeros((parts * part * rows, width), x_ND))
    row_N = jnp.arange(n)
    return y[row_N - shift_E[_group(row_N, ends_E)]]


def _group(number_N: jax.Array, ends_E: jax.Array) -> jax.Array:
    """The group of each number, if group e ends before ends[e]; the last group for numbers after the last end."""
    return jnp.minimum((number_N[:, None] >= ends_E[None]).sum(1), len(ends_E) - 1)


KERNEL = ExpertsKernel(
    each(_product),
    summed(functools.partial(_product, transposed=True)),
    functools.partial(row_loop.weight_gradient, least=_GRADIENT_ROWS),
)
