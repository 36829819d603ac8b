"""`grouped_matmul` on a TPU: the Pallas kernels of megablox (Gale et al. 2022, arXiv:2211.15841), which JAX has.

A kernel visits tiles of rows. A tile with rows of several groups is multiplied once for each of them.

Shapes: N rows, E groups, D input dims, F output dims.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from mesh_transformer.ops.experts.kernel import ExpertsKernel, each, summed

# The largest tiles, in bytes of a row of a tile: with two buffers of each tile they fit 16 MiB, the part of a core's
# memory that a kernel may use.
_WIDE, _NARROW = 4096, 2048
_COLUMNS = 512
# rows of a tile at most; lanes of a vector register, of which all widths of tiles are multiples
_ROWS, _LANES = 512, 128


def _product(
    x_ND: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, *, transposed: bool = False, interpret: bool
) -> jax.Array:
    # imported only where it is used: the import takes 60 ms
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    n, (groups, *shape) = len(x_ND), w_EDF.shape
    d, f = shape[::-1] if transposed else shape
    # all of D in one tile, if possible: a group's matrix is then read once for each tile of columns
    tiles = _rows(n, groups), _tile(d, _WIDE // x_ND.itemsize), _tile(f, _COLUMNS)
    padded = _padded(x_ND, tiles[0])
    with _loose_promotion():
        y_NF = gmm(padded, w_EDF, sizes_E, x_ND.dtype, tiles, transpose_rhs=transposed, interpret=interpret)
    return y_NF[:n]


def _weight_gradient(x_ND: jax.Array, dy_NF: jax.Array, sizes_E: jax.Array, *, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    rows, most = _rows(len(x_ND), len(sizes_E)), _NARROW // x_ND.itemsize
    tiles = rows, _tile(x_ND.shape[1], most), _tile(dy_NF.shape[1], most)
    x_DN, dy_NF = _padded(x_ND, rows).swapaxes(0, 1), _padded(dy_NF, rows)
    with _loose_promotion():
        return tgmm(x_DN, dy_NF, sizes_E, x_ND.dtype, tiles, interpret=interpret)


@contextlib.contextmanager
def _loose_promotion() -> Iterator[None]:
    """Let JAX convert dtypes and add dimensions on its own, as megablox expects."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _rows(n: int, groups: int) -> int:
    """The height of a tile: a quarter of the mean group. Each group wastes about one partial tile, so that higher tiles
    waste more rows."""
    return min(max(_LANES, n // groups // 4 // _LANES * _LANES), _ROWS)


def _tile(size: int, most: int) -> int:
    """The width of a tile: the whole dimension if it fits, else the width with the least padding, and of equal widths
    the largest."""
    if size <= most:
        return size
    return min(range(most, most // 2 - 1, -_LANES), key=lambda tile: -(-size // tile) * tile)


def _padded(x_ND: jax.Array, rows: int) -> jax.Array:
    """x with rows of zeros up to a multiple of `rows`."""
    return jnp.pad(x_ND, ((0, -len(x_ND) % rows), (0, 0)))


def kernel(*, interpret: bool = False) -> ExpertsKernel:
    """The kernels, compiled for a TPU or interpreted on any platform."""
    return ExpertsKernel(
        each(functools.partial(_product, interpret=interpret)),
        summed(functools.partial(_product, transposed=True, interpret=interpret)),
        each(functools.partial(_weight_gradient, interpret=interpret)),
    )


KERNEL = kernel()
