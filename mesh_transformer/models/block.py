"""The block of all families, as a `spec.Layer` describes it: the table of its mechanisms, and its inputs.

Shapes: B sequences, T positions, S keys, H heads, D residual width, L layers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from mesh_transformer import spec
from mesh_transformer.models.attention import Attention, JointLatentAttention, LatentAttention
from mesh_transformer.models.feed_forward import Experts, FeedForward
from mesh_transformer.models.modules import Context, Dropout, Linear, Norm, OutputBias, at_position, columns
from mesh_transformer.models.stack import Means, row_of
from mesh_transformer.ops.attend.cached import Cached, KeyValueView
from mesh_transformer.ops.forms import with_matrices
from mesh_transformer.ops.linear import row
from mesh_transformer.ops.positions import ENCODINGS, EncodedPositions
from mesh_transformer.parallel.sharding import Block, constrain
from mesh_transformer.spec import Decoder, PositionEncoding

# The named activations of a layer that the backward pass keeps, by the value of `compute.remat`; all with "none".
KEPT = {
    "full": ["block_in"],
    "save_attn": ["block_in", "attn_out"],
    "save_matmuls": ["block_in", "attn_out", "mlp_hidden"],
}


class BlockModule(Protocol):
    """The core of a mechanism, between its input and output projections, such as attention of q, k and v. The branch
    applies the projections `inputs` and `out` itself, so that its mechanisms share one matmul and one all-reduce, and
    adds the biases of outputs."""

    @property
    def inputs(self) -> Sequence[Linear]:
        """The projections of its input. If there are none, it is called with the input itself."""

    @property
    def keys(self) -> Sequence[Linear]:
        """The `inputs` that all positions need, also where only one position of a sequence is computed further."""

    @property
    def out(self) -> Linear | None:
        """The output projection; None if it returns the output itself."""

    @property
    def __call__(self) -> Callable[..., Any]:
        """(products of `inputs`, (B, T or 1, ...) each; without `inputs` the input (B, T or 1, D); ctx=a `Context`) ->
        the input of `out`; without `out` the output (B, T or 1, D). A mechanism that has named means over the tokens
        returns a pair: this, and the means."""


MODULES: dict[type[spec.Mechanism], Callable[[Any, int, float, str], BlockModule]] = {
    spec.AttentionSpec: Attention,
    spec.LatentAttentionSpec: LatentAttention,
    spec.JointLatentAttentionSpec: JointLatentAttention,
    spec.Dense: FeedForward,
    spec.ExpertsSpec: Experts,
}
"""(mechanism, residual width, standard deviation of the output's matrix, name) -> its module."""


def module_of(mechanism: spec.Mechanism, d_model: int, out_stddev: float) -> BlockModule:
    """The module of a mechanism, inside of a Haiku transform."""
    return MODULES[type(mechanism)](mechanism, d_model, out_stddev, mechanism.name)


# `Dropout`'s number for the adapter of a layer's first matrix. The branches of a layer have smaller numbers.
_FIRST_MATRIX = 1 << 8
# The window of a layer without one, among layers that have windows: more than any position.
NO_WINDOW = 1 << 30
Number = jax.Array | int | None
"""A traced array, a Python int, which is part of the program, or None."""


class LayerNumbers(NamedTuple):
    """The numbers of one layer; or of all layers, arrays with a leading dimension L. In the Python ints of one layer
    (`static_numbers`), None says that this layer has no such number."""

    # int32: `Context.window`; None if no layer has one
    window: Number
    # int32: the index of its position encoding among the encodings of its kind; None if no kind has several
    encoding: Number
    # int32: the number of the layer; None if nothing depends on it
    layer: Number = None


def static_numbers(decoder: Decoder) -> tuple[LayerNumbers, ...]:
    """The numbers of each layer, as Python ints, or None for a layer without a window or a position encoding."""
    layers = []
    for window, positions in decoder.numbers:
        encoding = None if positions is None else decoder.position_encodings[positions.kind].index(positions)
        layers.append(LayerNumbers(window, encoding))
    return tuple(layers)


def layer_numbers(decoder: Decoder, *, counted: bool = False) -> LayerNumbers:
    """The numbers of all layers, as arrays (L,). The windows are None if no layer has one; the encodings are None
    if every kind has one.

    Args:
        counted: with `LayerNumbers.layer`.
    """
    layers = static_numbers(decoder)
    windows = [NO_WINDOW if layer.window is None else layer.window for layer in layers]
    encodings = [layer.encoding or 0 for layer in layers]
    return LayerNumbers(
        jnp.asarray(windows, jnp.int32) if any(layer.window for layer in layers) else None,
        jnp.asarray(encodings, jnp.int32) if any(encodings) else None,
        jnp.arange(len(layers)) if counted else None,
    )


def encoded_positions(decoder: Decoder, positions_BT: jax.Array) -> tuple[EncodedPositions, ...]:
    """The positions in each kind of position encoding, such as the cosines and sines of rotary encoding:
    arrays (B or 1, T, ...). If a kind has several encodings, their arrays are stacked: (number of encodings, B or 1, T,
    ...)."""
    by_kind = []
    for kind, encodings in decoder.position_encodings.items():
        each = [ENCODINGS[type(kind)].positions(encoding, positions_BT, decoder.seq) for encoding in encodings]
        by_kind.append(each[0] if len(each) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *each))
    return tuple(by_kind)


def positions_of(
    decoder: Decoder, kind: PositionEncoding | None, encoded: Sequence[EncodedPositions], number: Number
) -> EncodedPositions | None:
    """The arrays of `encoded_positions` for one layer.

    Args:
        kind: the kind of its position encoding, if it has one.
        encoded: the result of `encoded_positions`.
        number: `LayerNumbers.encoding` of the layer.
    """
    if kind is None:
        return None
    of_kind: EncodedPositions = encoded[list(decoder.position_encodings).index(kind)]
    return of_kind if number is None or len(decoder.position_encodings[kind]) == 1 else row_of(of_kind, number)


def cached_attention(
    view: KeyValueView,
    index: jax.Array | int,
    positions_BT: jax.Array,
    bias_BHTS: jax.Array | None,
    query_index_B: jax.Array | None,
) -> Cached:
    """Attention to the keys and values of a view, of all positions or of one of each sequence."""
    if query_index_B is None:
        return Cached(view, index, positions_BT, positions_BT, bias_BHTS)
    if bias_BHTS is not None:
        bias_BHTS = at_position(bias_BHTS.swapaxes(1, 2), query_index_B).swapaxes(1, 2)
    return Cached(view, index, positions_BT, at_position(positions_BT, query_index_B), bias_BHTS)


def block(
    decoder: spec.Decoder, layer: spec.Layer, x_BTD: jax.Array, ctx: Context
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One layer of a kind: (B, T, D) -> (B, T or 1, D), and named means over the tokens (none for a dense layer).

    Matrices that multiply one input are in one call of `columns`. `row` sums the products of the tensor-parallel
    shards of all parts of a branch at once. The biases are added after it.
    """
    modules = {
        mechanism.name: module_of(mechanism, decoder.d_model, decoder.output_stddev) for mechanism in layer.mechanisms
    }
    means: dict[str, jax.Array] = {}
    # all positions are computed before the attention; after it, x has only the positions that the block returns
    everywhere = ctx._replace(query_index_B=None)
    for number, branch in enumerate(layer.branches):
        attends = layer.attention in branch.mechanisms
        y_BTD = _branch(branch, modules, x_BTD, ctx if attends else everywhere, means)
        if ctx.dropout is not None:
            y_BTD = ctx.dropout(y_BTD, number)
        x_BTD = (ctx.queries(x_BTD) if attends else x_BTD) + y_BTD
    return x_BTD, means


def block_of_forms(
    decoder: Decoder, kind: spec.Layer, params: Block, noise_BT2: jax.Array | None, layer: Number
) -> Block:
    """The parameters of a layer as its modules read them, from those that the decoder's forms store.

    Args:
        noise_BT2: as in `Dropout`; None without dropout.
        layer: the number of the layer; None without dropout.
    """

    def dropout(rate: float, number: int, matrix: spec.Array) -> Callable[[jax.Array], jax.Array] | None:
        if noise_BT2 is None or layer is None or not rate:
            return None
        inputs = matrix.axes[matrix.dims.index("i")]
        axes = ("block_seq", "act_embed") if inputs == "embed" else ("seq", inputs)
        drop = Dropout(rate, noise_BT2, layer)
        return lambda x_BTD: drop(x_BTD, _FIRST_MATRIX + number, ("batch", *axes))

    return with_matrices(params, decoder.matrices(kind), decoder.forms, dropout)


def _branch(
    branch: spec.Branch, modules: Mapping[str, BlockModule], x_BTD: jax.Array, ctx: Context, means: Means
) -> jax.Array:
    """The output of a branch, which is added to x: (B, T, D) -> (B, T or 1, D). Named means are added to `means`."""
    mixed, matrices, added = [], [], []
    # a reading is parts that share a norm of x
    for reading in branch.readings:
        parts = [modules[part.mechanism.name] for part in reading.parts]
        keys = [linear for part in parts for linear in part.keys]
        z_BTD = x_BTD if keys else ctx.queries(x_BTD)
        if reading.norm is not None:
            z_BTD = _norm(reading.norm, reading.name, z_BTD)
        inputs = [linear for part in parts for linear in part.inputs]
        products = iter(ctx.columns(z_BTD, inputs, keys) if keys else columns(z_BTD, inputs) if inputs else [])
        for part in parts:
            read = [next(products) for _ in part.inputs] or [ctx.queries(z_BTD) if keys else z_BTD]
            output = part(*read, ctx=ctx)
            y, part_means = output if isinstance(output, tuple) else (output, {})
            means |= part_means
            if part.out is None:
                added.append(y)
            else:
                mixed.append(y)
                matrices.append(part.out.w)
    outputs = [row(mixed, matrices)] if mixed else []
    y_BTD = functools.reduce(jnp.add, [*outputs, *added])
    for mechanism in branch.mechanisms:
        if mechanism.out_bias:
            y_BTD = OutputBias(name=f"{mechanism.name}_out")(y_BTD)
    if branch.post is not None:
        y_BTD = _norm(branch.post, branch.post_name, y_BTD)
    if branch.scale != 1:
        y_BTD = y_BTD * jnp.asarray(branch.scale, y_BTD.dtype)
    return y_BTD


def _norm(norm: spec.NormSpec, name: str, x_BTD: jax.Array) -> jax.Array:
    return constrain(Norm(norm, name=name)(x_BTD), "batch", "block_seq", "act_embed")
