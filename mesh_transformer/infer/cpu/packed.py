"""Parameters in the layout for decoding on a CPU: the layers one by one, for products with few rows.

Shapes: ... leading dims of an input, D input dims, F output dims.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer import spec
from mesh_transformer.ops.linear import StoredMatrix
from mesh_transformer.parallel.sharding import Block, Params

# Elements of a matrix that are converted and multiplied at a time.
BLOCK = 1 << 19


def pack(parts: Iterable[tuple[str, Params]], decoder: spec.Decoder) -> Params:
    """The parameters of a model. "blocks" is a tuple of a `PackedLayer` for each layer, and the head's matrix is
    `Transposed`.

    With stacked layers, XLA for CPU copies each layer at every step. The matrices of the last layer are not joined,
    because most of them are applied to a single position of a prompt. Each part is packed before the next one is read.

    Args:
        parts: ("embed", parameters), ("head", parameters), and ("blocks", parameters of a layer) for each layer in
            order: the result of `checkpoint.load.load_by_layer`.
    """
    params: Params = {"blocks": ()}
    for stage, part in parts:
        if stage == "blocks":
            number = len(params["blocks"])
            layer = decoder.layers[number]
            joined = list(_joined(decoder, layer)) if number < len(decoder.layers) - 1 else []
            packed = PackedLayer.of(part, decoder.layer_arrays(layer), joined)
            params["blocks"] += (jax.block_until_ready(packed),)
        else:
            params[stage] = PackedLayer.of(part, decoder.head_arrays).unpack() if stage == "head" else part
        # free the part before the next one is read
        del part
    return params


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w_FD"], meta_fields=["start", "stop"])
@dataclasses.dataclass(frozen=True)
class Transposed(StoredMatrix):
    """A matrix (D, F), stored as rows start .. stop - 1 of a transposed array.

    XLA for CPU multiplies a transposed matrix faster. Further rows of the array may be matrices that multiply the same
    input: XLA then computes one product for all of them. Elements of two bytes are stored as uint16: see
    `_product_of_bits`.
    """

    w_FD: jax.Array
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """See `StoredMatrix`."""
        return self.w_FD.shape[1], self.stop - self.start

    def product(self, x_D: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
        """See `StoredMatrix`."""
        product = _product_of_bits if self.w_FD.dtype == jnp.uint16 else _product
        return product(x_D, self.w_FD, out_dtype)[..., self.start : self.stop]

    def dense(self) -> jax.Array:
        """See `StoredMatrix`."""
        w_FD = self.w_FD[self.start : self.stop]
        # the only dtype of two bytes
        return (jax.lax.bitcast_convert_type(w_FD, jnp.bfloat16) if w_FD.dtype == jnp.uint16 else w_FD).T


def _product(x_D: jax.Array, w_FD: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum("...d,fd->...f", x_D, w_FD, preferred_element_type=out_dtype)


def _product_of_bits(x_D: jax.Array, bits_FD: jax.Array, out_dtype: jnp.dtype) -> jax.Array:
    """The product with a matrix of x's dtype that is given as uint16, a block of rows at a time.

    XLA for CPU multiplies bfloat16 in float32. It converts every bfloat16 matrix that a program reads, before the
    program begins. It does not convert integers, so here only one block exists in float32, which fits the processor's
    cache.
    """
    rows, width = bits_FD.shape
    block_rows = max((n for n in range(1, rows) if rows % n == 0 and n * width <= BLOCK), default=rows)
    x_D, dtype = x_D.astype(jnp.float32), x_D.dtype

    def product(bits_fD: jax.Array) -> jax.Array:
        w_fD = jax.lax.bitcast_convert_type(bits_fD, dtype).astype(jnp.float32)
        return _product(x_D, w_fD, jnp.dtype(jnp.float32)).astype(out_dtype)

    y_Nf = jax.lax.map(product, rearrange(bits_FD, "(n f) d -> n f d", f=block_rows))
    return rearrange(y_Nf, "n ... f -> ... (n f)")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["others", "joined"], meta_fields=["names", "sizes"])
@dataclasses.dataclass(frozen=True)
class PackedLayer:
    """The parameters of a layer. Each matrix is `Transposed`, matrices that multiply one input in one array. The
    matrices of routed experts stay as they are, their elements of two bytes as uint16, which `ops.experts.row_loop`
    reads.
    """

    others: Block
    # (sum of F, D) for each group: its matrices, transposed, one below the other
    joined: tuple[jax.Array, ...]
    # the Haiku modules of each group, whose "w" are concatenated
    names: tuple[tuple[str, ...], ...]
    # F of each of these matrices
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, block: Block, arrays: spec.Arrays, groups: Sequence[tuple[str, ...]] = ()) -> PackedLayer:
        """Pack the parameters by module and name, given their specification. `groups` are the modules whose matrices
        are joined."""
        grouped = {name for names in groups for name in names}
        others = {
            module: {
                name: _packed(leaf, arrays[f"{module}/{name}"])
                for name, leaf in leaves.items()
                if not (module in grouped and name == "w")
            }
            for module, leaves in block.items()
        }
        joined = tuple(jnp.concatenate([as_bits(block[name]["w"].T) for name in names]) for names in groups)
        sizes = tuple(tuple(block[name]["w"].shape[1] for name in names) for names in groups)
        return cls(others, joined, tuple(groups), sizes)

    def unpack(self) -> Block:
        """The parameters by module and name, for use inside a program."""
        block = {module: dict(leaves) for module, leaves in self.others.items()}
        for w_FD, names, sizes in zip(self.joined, self.names, self.sizes, strict=True):
            ends = np.cumsum(sizes).tolist()
            for name, size, end in zip(names, sizes, ends, strict=True):
                block[name]["w"] = Transposed(w_FD, end - size, end)
        return block


def _packed(leaf: jax.Array, array: spec.Array) -> jax.Array | Transposed:
    # one matrix for each expert, which `ops.experts.row_loop` reads
    if array.axes[:1] == ("experts",):
        return as_bits(leaf) if leaf.ndim > 2 else leaf
    return Transposed(as_bits(leaf.T), 0, leaf.shape[1]) if leaf.ndim == 2 else leaf


def as_bits(w: jax.Array) -> jax.Array:
    """An array whose elements of two bytes are uint16."""
    return jax.lax.bitcast_convert_type(w, jnp.uint16) if w.dtype.itemsize == 2 else w


def _joined(decoder: spec.Decoder, layer: spec.Layer) -> Iterator[tuple[str, ...]]:
    """The names of modules of a layer whose matrices share an input: `pack` concatenates them. Experts that all tokens
    share are computed apart from the router."""
    for branch in layer.branches:
        for reading in branch.readings:
            together: list[str] = []
            apart: list[str] = []
            for mechanism in (part.mechanism for part in reading.parts):
                for path, array in mechanism.arrays(decoder.d_model).items():
                    if array.role == "input" and len(array.shape) == 2 and path.endswith("/w"):
                        name = f"{mechanism.name}/{path.removesuffix('/w')}"
                        (together if path.count("/") == 1 else apart).append(name)
            yield from (tuple(names) for names in (together, apart) if names)
