"""Affine maps and lookups in tables, whose gradients compile well everywhere.

Devices split matrices by columns (`column`), then by rows (`row`), as in Megatron (Shoeybi et al. 2019,
arXiv:1909.08053). The partition decides how they communicate:

- The residual stream is whole on each device, or there is no partition: the products are plain. The partitioner sums
  the products of `row` over the devices.
- The devices that split the matrices also split the positions of the residual stream (Korthikanti et al. 2022,
  arXiv:2205.05198): `column` gathers its input, and `row` sums and scatters its result, each in one collective.
- The same with `Partition.overlap_tp`: both go around a ring, in parts, while other parts are multiplied.

`ops.collective_matmul` has the second and the third.

Shapes: ... leading dims (N when flattened: all tokens), D input dims, F output dims. B sequences, T positions.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import PartitionSpec

from mesh_transformer.parallel.sharding import Axes, Partition, active, constrain

if TYPE_CHECKING:
    from mesh_transformer.ops.collective_matmul import AxisDevices


class StoredMatrix(abc.ABC):
    """A matrix (D, F) in a special storage format, a pytree."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(D, F)."""

    @abc.abstractmethod
    def product(self, x_D: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
        """x w: (..., D) -> (..., F) of `out_dtype`."""

    @abc.abstractmethod
    def dense(self) -> jax.Array:
        """The matrix as one array."""

    def __len__(self) -> int:
        return self.shape[0]


Matrix = jax.Array | StoredMatrix
"""A matrix (D, F)."""


class Term(NamedTuple):
    """One term of a matrix that is a sum: the product of its factors, times `scale`."""

    # (D, F); or (D, R) and (R, F), where devices do not split R
    factors: tuple[Matrix, ...]
    scale: float | jax.Array = 1.0
    # a function of x before the product
    of_input: Callable[[jax.Array], jax.Array] | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether the term is one matrix and nothing else."""
        return len(self.factors) == 1 and self.of_input is None and isinstance(self.scale, float) and self.scale == 1


_Product = Callable[[jax.Array, Matrix], jax.Array]


class SumOfTerms(StoredMatrix):
    """A matrix that is a sum of products (`terms`). No array of its own size is made to multiply by it."""

    @property
    @abc.abstractmethod
    def terms(self) -> Sequence[Term]:
        """The terms."""

    def product(self, x_D: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
        """See `StoredMatrix`."""
        to_out = functools.partial(matmul, out_dtype=out_dtype)
        return sum_of_products(self.terms, x_D, to_out, functools.partial(matmul, out_dtype=x_D.dtype), to_out)


def sum_of_products(
    terms: Sequence[Term], x_D: jax.Array, by_matrix: _Product, by_first: _Product, by_last: _Product
) -> jax.Array:
    """x times each term, added: (..., D) -> (..., F).

    Args:
        by_matrix: the product with a factor (D, F).
        by_first: the product with a factor (D, R).
        by_last: the product with a factor (R, F).
    """
    ys = []
    for factors, scale, of_input in terms:
        x = x_D if of_input is None else of_input(x_D)
        y = by_matrix(x, factors[0]) if len(factors) == 1 else by_last(by_first(x, factors[0]), factors[1])
        ys.append(y if isinstance(scale, float) and scale == 1 else y * scale)
    return functools.reduce(operator.add, ys)


def terms_of(w: Matrix) -> Sequence[Term]:
    """The terms of a matrix, also of a sum in a sum; the matrix itself, if it is no sum."""
    if not isinstance(w, SumOfTerms):
        return (Term((w,)),)
    return [inner for term in w.terms for inner in (terms_of(term.factors[0]) if term.is_matrix else (term,))]


def dense(w: Matrix) -> jax.Array:
    """A matrix as one array."""
    return w.dense() if isinstance(w, StoredMatrix) else w


def matmul(
    x_D: jax.Array,
    w_DF: Matrix,
    out_dtype: jnp.dtype,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
) -> jax.Array:
    """x w: (..., D), (D, F) -> (..., F) of `out_dtype`. The gradients are computed in x's dtype.

    At the default precision, a TPU rounds float32 factors to bfloat16, and a GPU may round them to TF32.
    """
    if isinstance(w_DF, StoredMatrix):
        return w_DF.product(x_D, out_dtype)
    return _matmul(x_D, w_DF, out_dtype, precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul(x_D: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype, precision: jax.lax.Precision) -> jax.Array:
    return jnp.matmul(x_D, w_DF, precision=precision, preferred_element_type=out_dtype)


def _matmul_forward(
    x_D: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype, precision: jax.lax.Precision
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _matmul(x_D, w_DF, out_dtype, precision), (x_D, w_DF)


def _matmul_backward(
    out_dtype: jnp.dtype, precision: jax.lax.Precision, saved: tuple[jax.Array, jax.Array], dy_F: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x_D, w_DF = saved
    dy_F = dy_F.astype(x_D.dtype)
    return jnp.einsum("...f,df->...d", dy_F, w_DF), weight_gradient(x_D, dy_F)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def weight_gradient(x_D: jax.Array, dy_F: jax.Array) -> jax.Array:
    """The gradient of w in y = x w: (..., D), (..., F) -> (D, F), of x's dtype."""
    partition = active()
    if partition is not None and partition.size("seq") > 1:
        # devices split two of the leading dims: to make one of them, they would gather the positions
        return _weight_gradient_unflattened(x_D, dy_F)
    ways = {"cpu": _weight_gradient_cpu, "tpu": _weight_gradient_unflattened}
    return jax.lax.platform_dependent(x_D, dy_F, default=_weight_gradient, **ways)


def _weight_gradient(x_D: jax.Array, dy_F: jax.Array) -> jax.Array:
    return jnp.einsum("nd,nf->df", *_flattened(x_D, dy_F))


def _weight_gradient_unflattened(x_D: jax.Array, dy_F: jax.Array) -> jax.Array:
    """The same without one leading dim for all tokens: a TPU would copy heads to flatten them, whose positions are not
    beside their sequences in memory."""
    leading = tuple(range(x_D.ndim - 1))
    return jax.lax.dot_general(x_D, dy_F, ((leading, leading), ((), ())))


def _weight_gradient_cpu(x_D: jax.Array, dy_F: jax.Array) -> jax.Array:
    """The same with the smaller factor transposed first: XLA for CPU is slow to contract over rows.

    The barriers keep XLA from undoing the transposition.
    """
    x_ND, dy_NF = _flattened(x_D, dy_F)
    pin = jax.lax.optimization_barrier
    if x_ND.shape[1] <= dy_NF.shape[1]:
        return jnp.matmul(pin(x_ND.T), dy_NF)
    return pin(jnp.matmul(pin(dy_NF.T), x_ND)).T


def _flattened(x_D: jax.Array, dy_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rearrange(x_D, "... d -> (...) d"), rearrange(dy_F, "... f -> (...) f")


@jax.custom_vjp
def add_bias(x_F: jax.Array, b_F: jax.Array) -> jax.Array:
    """x + b: (..., F), (F,) -> (..., F) of x's dtype.

    db = sum over tokens of dy, summed in float32.
    """
    return x_F + jax.lax.broadcast_to_rank(b_F.astype(x_F.dtype), x_F.ndim)


def _add_bias_forward(x_F: jax.Array, b_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x_F, b_F), b_F


def _add_bias_backward(b_F: jax.Array, dy_F: jax.Array) -> tuple[jax.Array, jax.Array]:
    db_F = jax.lax.platform_dependent(dy_F, cpu=column_sums_by_product, default=column_sums)
    return dy_F, db_F.astype(b_F.dtype)


def column_sums(x_F: jax.Array) -> jax.Array:
    """(..., F) -> (F,), float32."""
    return x_F.sum(tuple(range(x_F.ndim - 1)), dtype=jnp.float32)


def column_sums_by_product(x_F: jax.Array) -> jax.Array:
    """The same as ones @ x: XLA for CPU is slow at sums of columns, and other devices at a product with one row."""
    x_NF = rearrange(x_F, "... f -> (...) f")
    ones_N = jnp.ones(len(x_NF), x_NF.dtype)
    return jnp.matmul(ones_N, x_NF, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


add_bias.defvjp(_add_bias_forward, _add_bias_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def lookup(table: jax.Array, indices: jax.Array, axis: int = 0, axes: Axes = ()) -> jax.Array:
    """`jnp.take`: the entries of a table along `axis`, such as the rows (V, D) of tokens (B, T) -> (B, T, D).

    The table's gradient is summed in float32, and then rounded to the table's dtype. A sum in bfloat16 loses up to a
    third of the gradient of an entry that is read thousands of times.

    Args:
        axes: the names of the first dimensions of the indices, if devices split them; `axis` is 0 then, and the rows of
            the table are "vocab".
    """
    return jnp.take(table, indices, axis=axis)


def _lookup_forward(
    table: jax.Array, indices: jax.Array, axis: int, axes: Axes
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return lookup(table, indices, axis, axes), (table, indices)


def _lookup_backward(
    axis: int, axes: Axes, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, None]:
    table, indices = saved
    # the values of the table are not read, so a compiled program makes no float32 copy of it
    table32 = table.astype(jnp.float32)

    def summed(indices: jax.Array, dy: jax.Array) -> jax.Array:
        _, pull = jax.vjp(lambda table: jnp.take(table, indices, axis=axis), table32)
        return pull(dy.astype(jnp.float32))[0]

    partition = active()
    divided = () if partition is None else _splitting(partition, *axes)
    if partition is None or not divided or not _divides(partition, table, indices, axes):
        return summed(indices, dy).astype(table.dtype), None
    # XLA's partitioner ends the process for this scatter in float32 on some meshes of several slices
    of_rows, taken = _splitting(partition, "vocab"), jax.sharding.get_abstract_mesh().manual_axes
    split = PartitionSpec(*(_splitting(partition, name) for name in axes))
    run = jax.shard_map(
        functools.partial(_sum_on_device, divided, of_rows, len(table) // partition.size("vocab")),
        mesh=partition.current_mesh,
        in_specs=(split, split),
        out_specs=PartitionSpec(of_rows),
        axis_names={axis for axis in partition.mesh.axis_names if axis not in taken},
    )
    return run(indices, dy).astype(table.dtype), None


def _splitting(partition: Partition, *names: str | None) -> tuple[str, ...]:
    """The mesh axes of several devices that split any of these dimensions."""
    axes = partition.axes(*(name for name in names if name is not None))
    return tuple(axis for axis in axes if partition.mesh.shape[axis] > 1)


def _divides(partition: Partition, table: jax.Array, indices: jax.Array, axes: Axes) -> bool:
    """Whether the devices have equal parts of the rows of a table and of the indices."""
    sizes = zip((len(table), *indices.shape), ("vocab", *axes), strict=False)
    return all(size % partition.size(name) == 0 for size, name in sizes)


def _sum_on_device(
    divided: tuple[str, ...], of_rows: tuple[str, ...], rows: int, indices: jax.Array, dy: jax.Array
) -> jax.Array:
    """The sums of dy (..., D) at the rows that this device has: (rows, D) float32.

    Args:
        divided: the mesh axes whose devices have different indices.
        of_rows: the mesh axes whose devices have different rows of the table.
    """
    first = jax.lax.axis_index(of_rows) * rows if of_rows else 0
    # a row of another device is out of range, and is dropped
    local_indices = jnp.where((indices >= first) & (indices < first + rows), indices - first, rows)
    zeros = jax.lax.pcast(jnp.zeros((rows, dy.shape[-1]), jnp.float32), (*divided, *of_rows), to="varying")
    return jax.lax.psum(zeros.at[local_indices].add(dy.astype(jnp.float32), mode="drop"), divided)


lookup.defvjp(_lookup_forward, _lookup_backward)


def column(x_BTD: jax.Array, ws_DF: Sequence[Matrix], names: Sequence[str | None]) -> list[jax.Array]:
    """x w for each w, of x's dtype: (B, T, D) -> (B, T, F) each, split by F. `names` names the dimensions F."""
    group = _group()
    if group is None:
        return [matmul(x_BTD, w, x_BTD.dtype) for w in ws_DF]
    if any(isinstance(w, SumOfTerms) for w in ws_DF):
        return _columns_of_terms(x_BTD, ws_DF, names)
    split = [group.partition.size(name) > 1 for name in names]
    divided = [cast(jax.Array, w) for w, is_split in zip(ws_DF, split, strict=True) if is_split]
    gathered = iter(group.gather_matmul(x_BTD, divided))
    # A device that holds a whole matrix multiplies its own positions.
    return [
        next(gathered) if is_split else _of_own_positions(x_BTD, w) for w, is_split in zip(ws_DF, split, strict=True)
    ]


def _columns_of_terms(x_BTD: jax.Array, ws_DF: Sequence[Matrix], names: Sequence[str | None]) -> list[jax.Array]:
    """`column` where some matrices are sums. All terms that are one matrix are multiplied together."""
    terms = [(number, term) for number, w in enumerate(ws_DF) for term in terms_of(w)]
    together = [(number, term.factors[0]) for number, term in terms if term.is_matrix]
    products = column(x_BTD, [w for _, w in together], [names[number] for number, _ in together]) if together else []
    ys: list[list[jax.Array]] = [[] for _ in ws_DF]
    for (number, _), y in zip(together, products, strict=True):
        ys[number].append(y)
    for number, term in terms:
        if not term.is_matrix:
            split = functools.partial(_column_of_one, names[number])
            ys[number].append(sum_of_products([term], x_BTD, split, _of_own_positions, split))
    return [functools.reduce(operator.add, of_matrix) for of_matrix in ys]


def _column_of_one(name: str | None, x_BTD: jax.Array, w_DF: Matrix) -> jax.Array:
    return column(x_BTD, [w_DF], [name])[0]


def _of_own_positions(x_BTD: jax.Array, w_DR: Matrix) -> jax.Array:
    """The product of the positions that a device has in the residual stream, with a matrix that no devices split."""
    return constrain(matmul(x_BTD, w_DR, x_BTD.dtype), "batch", "block_seq", None)


def row(xs_BTF: Sequence[jax.Array], ws_FD: Sequence[Matrix]) -> jax.Array:
    """The sum of the products x w, of their dtype: (B, T, F) each, split by F -> (B, T, D)."""
    group = _group()
    if group is None:
        return functools.reduce(operator.add, (matmul(x, w, x.dtype) for x, w in zip(xs_BTF, ws_FD, strict=True)))
    if any(isinstance(w, SumOfTerms) for w in ws_FD):
        pairs = zip(xs_BTF, ws_FD, strict=True)
        ys = [sum_of_products(terms_of(w), x, _row_of_one, _row_of_one, _of_own_positions) for x, w in pairs]
        return functools.reduce(operator.add, ys)
    return group.matmul_scatter(xs_BTF, cast(Sequence[jax.Array], ws_FD))


def _row_of_one(x_BTF: jax.Array, w_FD: Matrix) -> jax.Array:
    return row([x_BTF], [w_FD])


def _group() -> AxisDevices | None:
    """The devices that split the matrices and the positions of the residual stream; None if no devices do."""
    partition = active()
    if partition is None or partition.residual_axis is None:
        return None
    from mesh_transformer.ops.collective_matmul import AxisDevices

    return AxisDevices.of(partition, partition.residual_axis, weight_gradient)
