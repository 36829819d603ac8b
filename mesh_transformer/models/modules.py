"""The Haiku modules of blocks, embeddings and heads, and the inputs of a block.

The specification names the dimensions of parameters; the mesh decides elsewhere how these are split. Checkpoints
contain the names of the parameters, so these names do not change.

Shapes: B sequences, T positions, D residual width. Parameters are float32 and are cast to the compute dtype before
`apply`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from mesh_transformer import spec
from mesh_transformer.ops.attend.causal import Attend
from mesh_transformer.ops.experts import Dispatch
from mesh_transformer.ops.linear import add_bias, column, lookup, matmul
from mesh_transformer.ops.positions import EncodedPositions
from mesh_transformer.parallel.sharding import constrain, with_axes

# the generator of JAX whose numbers do not depend on how an array is split
_GENERATOR = "threefry2x32"


class Dropout(NamedTuple):
    """Dropout (Srivastava et al. 2014) with a mask that depends on seed, step, position and place in the model only.

    Every mesh, pipeline and resumed run has the same mask.
    """

    # the share of the numbers that are set to 0
    rate: float
    # uint32: the random numbers of each position of each sequence
    noise_BT2: jax.Array
    # int32: the layer, or -1 for the embedding
    layer: jax.Array | int

    def __call__(
        self, x_BTD: jax.Array, place: int = 0, axes: spec.Axes = ("batch", "block_seq", "act_embed")
    ) -> jax.Array:
        """x with dropped numbers as 0 and kept numbers divided by 1 - rate. `place` numbers the dropouts of a layer,
        `axes` names the dimensions of x."""

        def kept(noise_2: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(noise_2, impl=_GENERATOR)
            for number in (self.layer + 1, place):
                key = jax.random.fold_in(key, number)
            return jax.random.bernoulli(key, 1 - self.rate, x_BTD.shape[-1:])

        kept_BTD = constrain(jax.vmap(jax.vmap(kept))(self.noise_BT2), *axes)
        return jnp.where(kept_BTD, x_BTD / (1 - self.rate), 0).astype(x_BTD.dtype)


def noise(seed: int, step: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`Dropout.noise_BT2` of a step, for tokens of this shape: (*shape, 2)."""
    return jax.random.bits(jax.random.fold_in(jax.random.key(seed, impl=_GENERATOR), step), (*shape, 2), jnp.uint32)


class Context(NamedTuple):
    """The inputs of a block besides the residual stream."""

    attend: Attend
    # None without a position encoding of attention
    positions: EncodedPositions | None
    # int32: the number of keys that a query sees, the last of them at its own position; None for all up to its own
    window: jax.Array | int | None = None
    # int32 indices into T: the block returns only this position of each sequence, (B, 1, D); None for all
    query_index_B: jax.Array | None = None
    # how tokens reach routed experts
    dispatch: Dispatch = Dispatch()
    # None without dropout
    dropout: Dropout | None = None
    # bool: whether a token is part of a document, and counts in the statistics of routers; None if all tokens do
    real_BT: jax.Array | None = None

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """The positions of (B, T, ...) that the block returns: all, or one, (B, 1, ...)."""
        return x_BTD if self.query_index_B is None else at_position(x_BTD, self.query_index_B)

    def columns(
        self, x_BTD: jax.Array, linears: Sequence[Linear], everywhere: Sequence[Linear] = ()
    ) -> list[jax.Array]:
        """Linear maps of the positions that the block returns; the maps in `everywhere` are of all positions."""
        if self.query_index_B is None:
            return columns(x_BTD, linears)
        queries = self.queries(x_BTD)
        return [columns(x_BTD if linear in everywhere else queries, [linear])[0] for linear in linears]


def at_position(x_BTD: jax.Array, index_B: jax.Array) -> jax.Array:
    """One position of each sequence: (B, T, ...) and int32 indices into T -> (B, 1, ...)."""
    return jax.vmap(lambda x_TD, index: jax.lax.dynamic_slice_in_dim(x_TD, index, 1))(x_BTD, index_B)


def parameter(name: str, array: spec.Array) -> jax.Array:
    """A float32 parameter of the module, as the specification describes it."""
    if array.stddev is None:
        init = hk.initializers.Constant(array.constant)
    else:
        init = hk.initializers.TruncatedNormal(array.stddev)
    return hk.get_parameter(name, array.shape, jnp.float32, init=with_axes(init, *array.axes))


class Linear(hk.Module):
    """x @ w (+ b): (..., D_in) -> (..., D_out). w is truncated normal with `stddev`, by default 1 / sqrt(D_in).

    The products of a block are made elsewhere, from `w` (`columns`, `row`).
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        axes: tuple[str | None, str | None],
        *,
        bias: bool = False,
        stddev: float | None = None,
        name: str,
    ):
        super().__init__(name)
        arrays = spec.linear(axes, d_in, d_out, "other", bias=bias)
        self.axes = axes
        self.w = parameter("w", arrays["w"]._replace(stddev=stddev or arrays["w"].stddev))
        self.b = parameter("b", arrays["b"]) if bias else None

    @classmethod
    def of(cls, arrays: spec.Arrays, name: str) -> Self:
        """The linear map `name` of a module that has these arrays."""
        arrays = spec.inside(name, arrays)
        w = arrays["w"]
        d_in, d_out = w.shape
        return cls(d_in, d_out, (w.axes[0], w.axes[1]), bias="b" in arrays, stddev=w.stddev, name=name)

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        return self.biased(matmul(x, self.w, out_dtype or x.dtype))

    def biased(self, y: jax.Array) -> jax.Array:
        """y + b, of a product y with w; y itself without a bias."""
        return y if self.b is None else add_bias(y, self.b)


def columns(x_BTD: jax.Array, linears: Sequence[Linear]) -> list[jax.Array]:
    """Linear maps of one input, whose outputs devices split."""
    products = column(x_BTD, [linear.w for linear in linears], [linear.axes[1] for linear in linears])
    return [linear.biased(y) for linear, y in zip(linears, products, strict=True)]


class OutputBias(hk.Module):
    """x + b, for a bias that is added after a sum over tensor-parallel shards: (B, T, D) -> (B, T, D)."""

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        return add_bias(x_BTD, parameter("b", spec.Array(("embed",), x_BTD.shape[-1:])))


def _rms(x: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def _layer(x: jax.Array, eps: float) -> jax.Array:
    return _rms(x - x.mean(-1, keepdims=True), eps)


def _length(x: jax.Array, eps: float) -> jax.Array:
    return x / (jnp.sqrt(jnp.square(x).sum(-1, keepdims=True)) + eps)


# by kind of norm: (float32 x, eps) -> x normalized
_NORMS: dict[str, Callable[[jax.Array, float], jax.Array]] = {"layer": _layer, "rms": _rms, "length": _length}


class Norm(hk.Module):
    """A normalization (`spec.NormSpec`): (..., D) -> (..., D) of x's dtype, computed in float32; `axis` names D."""

    def __init__(self, norm: spec.NormSpec, name: str, axis: str | None = "embed"):
        super().__init__(name)
        self.norm, self.axis = norm, axis

    def __call__(self, x: jax.Array) -> jax.Array:
        y = _NORMS[self.norm.kind](x.astype(jnp.float32), self.norm.eps)
        arrays = self.norm.arrays(self.axis, x.shape[-1])

        def value_of(name: str) -> jax.Array:
            value = parameter(name, arrays[name]).astype(y.dtype)
            # with jnp.broadcast_to, the array that the backward pass keeps would have y's shape
            return jax.lax.broadcast_to_rank(value, y.ndim)

        y = y * (1 + value_of("scale") if self.norm.plus_one else value_of("scale"))
        return (y + value_of("offset") if self.norm.offset else y).astype(x.dtype)


Bias = Callable[[jax.Array, jax.Array], jax.Array]
"""The bias of attention's logits: positions of queries (B, T) and of keys (B, S) -> (B, H, T, S)."""


class Embedding(hk.Module):
    """Rows of a table (V, D), split by "vocab", plus a bias (D,) if there is one: tokens (B, T) int32 -> (B, T, D).

    The table is truncated normal with `stddev`, by default 1 / sqrt(V).
    """

    def __init__(self, rows: int, width: int, *, bias: bool = False, stddev: float | None = None, name: str):
        super().__init__(name)
        self.w_array = spec.Array(("vocab", "embed"), (rows, width), stddev=stddev or 1 / math.sqrt(rows))
        self.b_array = spec.Array(("embed",), (width,)) if bias else None

    @classmethod
    def of(cls, arrays: spec.Arrays, name: str) -> Self:
        """The embedding `name` of a model that has these arrays."""
        arrays = spec.inside(name, arrays)
        return cls(*arrays["w"].shape, bias="b" in arrays, stddev=arrays["w"].stddev, name=name)

    def __call__(self, tokens_BT: jax.Array) -> jax.Array:
        x_BTD = constrain(lookup(self.table(), tokens_BT, 0, ("batch", "seq")), "batch", "seq", "act_embed")
        return x_BTD if self.b_array is None else add_bias(x_BTD, parameter("b", self.b_array))

    def table(self) -> jax.Array:
        """(V, D)."""
        return parameter("w", self.w_array)


class PositionTable(hk.Module):
    """A learned vector for each position, added to the embedding: positions (B, T) -> (B, T, D)."""

    def __init__(self, array: spec.Array, name: str):
        super().__init__(name)
        self.array = array

    def __call__(self, positions_BT: jax.Array) -> jax.Array:
        return lookup(parameter("w", self.array), positions_BT)


class RelativeBias(hk.Module):
    """T5's learned bias for each head and bucket of distances (Raffel et al. 2020): a `Bias`."""

    def __init__(self, array: spec.Array, n_positions: int, name: str):
        super().__init__(name)
        self.array, self.bucket_of = array, t5_buckets(n_positions)

    def __call__(self) -> Bias:
        table_HN = parameter("w", self.array)

        def bias(positions_BT: jax.Array, keys_BS: jax.Array) -> jax.Array:
            distance = positions_BT[:, :, None] - keys_BS[:, None]
            distance = jnp.clip(distance, 0, len(self.bucket_of) - 1)
            bias_HBTS = lookup(table_HN, jnp.asarray(self.bucket_of)[distance], 1)
            return rearrange(bias_HBTS, "h b t s -> b h t s")

        return bias


def t5_buckets(n_positions: int, buckets: int = spec.T5_BUCKETS, max_distance: int = 128) -> np.ndarray:
    """Bucket of each distance 0 .. n_positions - 1 to an earlier key (Raffel et al. 2020, one direction).

    The first half of the buckets hold one distance each, the rest grow logarithmically up to `max_distance`.
    Returns (n_positions,) int32.
    """
    exact = buckets // 2
    distance = np.arange(n_positions)
    grown = np.log(np.maximum(distance, 1).astype(np.float32) / exact + np.finfo(np.float32).eps)
    far = exact + (grown / np.log(max_distance / exact) * (buckets - exact)).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(far, buckets - 1)).astype(np.int32)
