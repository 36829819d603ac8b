"""Products with matrices that devices split: by columns (`column`), then by rows (`row`), as in Megatron (Shoeybi et
al. 2019, arXiv:1909.08053).

The partition decides how the devices communicate:

- The residual stream is whole on each device, or there is no partition: the products are plain. The partitioner sums
  those of `row` over the devices.
- The devices that split the matrices also split the positions of the residual stream (Korthikanti et al. 2022,
  arXiv:2205.05198): `column` gathers its input, and `row` sums and scatters its result, each in one collective.
- The same with `Partition.overlap_tp`: both go around a ring, in parts, while other parts are multiplied.

`ops.collective_matmul` has the second and the third.

Shapes: B sequences, T positions, D residual width, F columns.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import jax

from mesh_transformer.ops.collective_matmul import Group, gather_matmul, matmul_scatter
from mesh_transformer.ops.linear import Transposed, matmul
from mesh_transformer.parallel.sharding import active, constrain


def column(x_BTD: jax.Array, ws_DF: Sequence[jax.Array | Transposed], names: Sequence[str | None]) -> list[jax.Array]:
    """x w for each w, of x's dtype: (B, T, D) -> (B, T, F) each, split by F. `names` names the dimensions F."""
    group = _group()
    if group is None:
        return [matmul(x_BTD, w, x_BTD.dtype) for w in ws_DF]
    split = [group.partition.size(name) > 1 for name in names]
    gathered = iter(gather_matmul(group, x_BTD, [w for w, is_split in zip(ws_DF, split, strict=True) if is_split]))
    # A device that holds a whole matrix multiplies its own positions.
    return [
        next(gathered) if is_split else constrain(matmul(x_BTD, w, x_BTD.dtype), "batch", "block_seq", None)
        for w, is_split in zip(ws_DF, split, strict=True)
    ]


def row(xs_BTF: Sequence[jax.Array], ws_FD: Sequence[jax.Array | Transposed]) -> jax.Array:
    """The sum of the products x w, of their dtype: (B, T, F) each, split by F -> (B, T, D)."""
    group = _group()
    if group is None:
        return functools.reduce(operator.add, (matmul(x, w, x.dtype) for x, w in zip(xs_BTF, ws_FD, strict=True)))
    return matmul_scatter(group, xs_BTF, ws_FD)


def _group() -> Group | None:
    """The devices that split the positions of the residual stream, and the matrices; None: it is whole on each."""
    partition = active()
    return None if partition is None else Group.of(partition)
