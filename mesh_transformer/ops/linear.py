"""Affine maps and lookups in tables, whose gradients compile well everywhere.

Shapes: ... leading dims (N when flattened: all tokens), D input dims, F output dims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import PartitionSpec

from mesh_transformer.parallel.sharding import Axes, Block, Partition, active

# Elements of a matrix that are converted and multiplied at a time.
BLOCK = 1 << 19


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w_FD"], meta_fields=["start", "stop"])
@dataclasses.dataclass(frozen=True)
class Transposed:
    """A matrix (D, F), stored as rows start .. stop - 1 of a transposed array. Not differentiable.

    XLA for CPU multiplies a transposed matrix faster. The array's other rows may be matrices that multiply the same
    input: XLA then computes one product for all of them. Elements of two bytes are stored as uint16: see
        `_product_of_bits`.
    """

    w_FD: jax.Array
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix, (D, F)."""
        return self.w_FD.shape[1], self.stop - self.start


def matmul(
    x_D: jax.Array,
    w_DF: jax.Array | Transposed,
    out_dtype: jnp.dtype,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
) -> jax.Array:
    """x w: (..., D), (D, F) -> (..., F) of `out_dtype`. The gradients are computed in x's dtype.

    At the default precision, a TPU rounds float32 factors to bfloat16, and a GPU may round them to TF32.
    """
    if isinstance(w_DF, Transposed):
        product = _product_of_bits if w_DF.w_FD.dtype == jnp.uint16 else _product
        return product(x_D, w_DF.w_FD, out_dtype)[..., w_DF.start : w_DF.stop]
    return _matmul(x_D, w_DF, out_dtype, precision)


def _product(x_D: jax.Array, w_FD: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum("...d,fd->...f", x_D, w_FD, preferred_element_type=out_dtype)


def _product_of_bits(x_D: jax.Array, bits_FD: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """The product with a matrix of x's dtype that is given as uint16, a block of rows at a time.

    XLA for CPU multiplies bfloat16 in float32. It converts every bfloat16 matrix that a program reads, before the
    program begins. It does not convert integers, so here only one block exists in float32, which fits the processor's
    cache.
    """
    rows, width = bits_FD.shape
    some = max((n for n in range(1, rows) if rows % n == 0 and n * width <= BLOCK), default=rows)
    x_D, dtype = x_D.astype(jnp.float32), x_D.dtype

    def product(bits_fD: jax.Array) -> jax.Array:
        w_fD = jax.lax.bitcast_convert_type(bits_fD, dtype).astype(jnp.float32)
        return _product(x_D, w_fD, jnp.dtype(jnp.float32)).astype(out_dtype)

    y_Nf = jax.lax.map(product, rearrange(bits_FD, "(n f) d -> n f d", f=some))
    return rearrange(y_Nf, "n ... f -> ... (n f)")


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
    own = jnp.where((indices >= first) & (indices < first + rows), indices - first, rows)
    zeros = jax.lax.pcast(jnp.zeros((rows, dy.shape[-1]), jnp.float32), (*divided, *of_rows), to="varying")
    return jax.lax.psum(zeros.at[own].add(dy.astype(jnp.float32), mode="drop"), divided)


lookup.defvjp(_lookup_forward, _lookup_backward)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["others", "joined"], meta_fields=["names", "sizes"])
@dataclasses.dataclass(frozen=True)
class PackedBlock:
    """The parameters of a block, stored for products with few rows on CPU.

    Each matrix is transposed. Matrices that multiply the same input are concatenated.
    """

    others: Block
    # (sum of F, D) for each group: its matrices, transposed, one below the other
    joined: tuple[jax.Array, ...]
    # the Haiku modules of each group, whose "w" are concatenated
    names: tuple[tuple[str, ...], ...]
    # F of each of these matrices
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def pack(cls, block: Block, fuse: Sequence[Sequence[str]], as_bits: Sequence[str] = ()) -> PackedBlock:
        """Pack `block`, the parameters by module and name. `fuse` lists the groups of modules whose matrices are
        joined, `as_bits` the modules whose arrays stay as they are, matrices of two bytes as uint16."""
        groups = [present for names in fuse if (present := [name for name in names if name in block])]
        grouped = {name for names in groups for name in names}
        others = {
            module: {
                name: (_bits(leaf) if leaf.ndim > 2 else leaf) if module in as_bits else _packed(leaf)
                for name, leaf in leaves.items()
                if not (module in grouped and name == "w")
            }
            for module, leaves in block.items()
        }
        joined = tuple(jnp.concatenate([_stored(block[name]["w"]) for name in names]) for names in groups)
        sizes = tuple(tuple(block[name]["w"].shape[1] for name in names) for names in groups)
        return cls(others, joined, tuple(map(tuple, groups)), sizes)

    def unpack(self) -> Block:
        """The parameters by module and name, for use inside a program."""
        block = {module: dict(leaves) for module, leaves in self.others.items()}
        for w_FD, names, sizes in zip(self.joined, self.names, self.sizes, strict=True):
            ends = np.cumsum(sizes).tolist()
            for name, size, end in zip(names, sizes, ends, strict=True):
                block[name]["w"] = Transposed(w_FD, end - size, end)
        return block


def _packed(leaf: jax.Array) -> jax.Array | Transposed:
    return Transposed(_stored(leaf), 0, leaf.shape[1]) if leaf.ndim == 2 else leaf


def _stored(w_DF: jax.Array) -> jax.Array:
    """A matrix (D, F) as `Transposed` stores it, (F, D)."""
    return _bits(w_DF.T)


def _bits(w: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(w, jnp.uint16) if w.dtype.itemsize == 2 else w
