"""Products of groups of rows, each with the matrix of its group.

Each platform has its own way, since XLA multiplies every row with every matrix on CPU and GPU (`jax.lax.ragged_dot`),
and for the gradient of the matrices on TPU.

Shapes: N rows, E groups, D input dims, F output dims.
"""

from __future__ import annotations

import functools
import importlib

import jax

from mesh_transformer.ops.experts.kernel import Arrays, ExpertsKernel, live
from mesh_transformer.parallel.sharding import platform

# the module of each platform's kernel, which is imported where it is used
_MODULES = {"cpu": "row_loop", "gpu": "row_blocks", "tpu": "megablox"}


def grouped_matmul(x_ND: jax.Array, w_EDF: Arrays, sizes_E: jax.Array, *, all_rows: bool = False) -> Arrays:
    """Row i of x times each matrix of its group: (N, D), (E, D, F) each -> (N, F) each, of x's dtype.

    The first sizes[0] rows are group 0's, the next sizes[1] rows group 1's, and so on; `sizes_E` is int32. The rows
    after the last group are 0 in the result and in the gradient of x, and do not count in that of w; the gradient of
    the result must be finite there.

    Args:
        all_rows: whether every row belongs to a group. Then no pass over the rows writes zeros.
    """
    return _grouped_matmul(_kernel(platform()), all_rows, x_ND, w_EDF, sizes_E)


@functools.cache
def _kernel(platform: str) -> ExpertsKernel:
    kernel: ExpertsKernel = importlib.import_module(f"{__package__}.{_MODULES[platform]}").KERNEL
    return kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped_matmul(
    kernel: ExpertsKernel, all_rows: bool, x_ND: jax.Array, w_EDF: Arrays, sizes_E: jax.Array
) -> Arrays:
    return _live(kernel.product(x_ND, w_EDF, sizes_E), sizes_E, all_rows)


def _live(ys: Arrays, sizes_E: jax.Array, all_rows: bool) -> Arrays:
    """Products with zeros in the rows after the last group."""
    return ys if all_rows else tuple(live(y_NF, sizes_E) for y_NF in ys)


def _forward(
    kernel: ExpertsKernel, all_rows: bool, x_ND: jax.Array, w_EDF: Arrays, sizes_E: jax.Array
) -> tuple[Arrays, tuple[jax.Array, Arrays, jax.Array]]:
    return _live(kernel.product(x_ND, w_EDF, sizes_E), sizes_E, all_rows), (x_ND, w_EDF, sizes_E)


def _backward(
    kernel: ExpertsKernel, all_rows: bool, saved: tuple[jax.Array, Arrays, jax.Array], dys: Arrays
) -> tuple[jax.Array, Arrays, None]:
    x_ND, w_EDF, sizes_E = saved
    dys = tuple(dy_NF.astype(x_ND.dtype) for dy_NF in dys)
    (dx_ND,) = _live((kernel.product_transposed(dys, w_EDF, sizes_E),), sizes_E, all_rows)
    gradients = kernel.weight_gradient(x_ND, dys, sizes_E)
    return dx_ND, tuple(dw.astype(w.dtype) for dw, w in zip(gradients, w_EDF, strict=True)), None


_grouped_matmul.defvjp(_forward, _backward)
