"""All layers of a model, without a cache or with one: for scoring, prefill and decode.

Shapes: B sequences (or cache slots), T positions, S key positions, D residual width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from mesh_transformer.config import ComputeConfig
from mesh_transformer.models.modules import Context, Means, at_position
from mesh_transformer.models.numbers import layer_numbers, static_numbers
from mesh_transformer.models.stack import LAYER_LOOP, Blocks, Kind, Outputs, Rows, by_row, over_layers
from mesh_transformer.ops.attend import context
from mesh_transformer.ops.attend.cached import Cached, KeyValueView
from mesh_transformer.ops.attend.kernel import Windows
from mesh_transformer.ops.positions import EncodedPositions
from mesh_transformer.parallel.sharding import Block, constrain
from mesh_transformer.spec import Decoder, Layer, Run

Views = Sequence[KeyValueView | None]
"""The caches of groups of layers; None: no cache."""
_Carry = tuple[jax.Array, KeyValueView | None]
"""What a layer passes on to the next: the residual stream, and the view that it has written."""
_Computed = tuple[_Carry, Outputs]
_Carries = tuple[jax.Array, Views]


class LayeredModel(Protocol):
    """What the loop reads of `models.model.Model`, where these are described."""

    @property
    def decoder(self) -> Decoder:
        """The specification."""

    @property
    def compute(self) -> ComputeConfig:
        """The settings of the arithmetic."""

    @property
    def runs(self) -> Sequence[Run[Kind]]:
        """The layers by their kinds."""

    @property
    def encoded_positions(self) -> Callable[[jax.Array], Sequence[EncodedPositions]]:
        """The arrays of the position encodings."""

    @property
    def context(self) -> Callable[..., Context]:
        """What a layer reads besides the residual stream."""

    @property
    def layer(self) -> Callable[..., tuple[jax.Array, Means]]:
        """One layer of a kind."""


def layers(
    model: LayeredModel,
    params: Blocks,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    bias_BHTS: jax.Array | None,
    cache: KeyValueView | None,
    query_index_B: jax.Array | None,
) -> tuple[jax.Array, KeyValueView | None]:
    """The residual stream after the last layer, (B, T, D) or (B, 1, D), and the cache: see `Model.hidden`.

    Args:
        params: the parameters "blocks".
        bias_BHTS: what every layer adds to the logits of its attention; None: nothing.
    """
    encoded, count = model.encoded_positions(positions_BT), len(model.decoder.layers)
    views: Views = [None]
    view_of: Sequence[int] = [0] * count
    if cache is not None:
        views, view_of = cache.split(count)

    def layer(kind: Layer, carry: _Carry, block: Block, row: Rows, query_index_B: jax.Array | None = None) -> _Computed:
        (x_BTD, view), (index, numbers) = carry, row
        attend = _bind(view, index, positions_BT, bias_BHTS, query_index_B, model.decoder.windows)
        ctx = model.context(kind, attend, encoded, numbers, query_index_B)
        x_BTD, means = model.layer(kind, block, x_BTD, ctx)
        return (x_BTD, attend.view), (None, means)

    with jax.named_scope(LAYER_LOOP):
        if isinstance(params, tuple):
            last = None if cache is None else query_index_B
            x_BTD, views = _one_by_one(model, layer, x_BTD, views, view_of, params, last)
        else:
            x_BTD, views = _stacked(model, layer, x_BTD, views, view_of, params)
    if query_index_B is not None and x_BTD.shape[1] > 1:
        x_BTD = at_position(x_BTD, query_index_B)
    return constrain_residual(x_BTD), None if cache is None else cache.joined(views)


def _stacked(
    model: LayeredModel,
    layer: Callable[..., _Computed],
    x_BTD: jax.Array,
    views: Views,
    view_of: Sequence[int],
    params: Block,
) -> _Carries:
    """The loop over stacked layers. If they have several views, the view and the numbers of a layer are part of the
    program: a ring needs its window as a number."""
    unroll = model.compute.scan_unroll
    if len(views) == 1:

        def one(kind: Kind, carry: _Carry, block: Block, row: Rows) -> _Computed:
            return layer(kind.layer, carry, block, row)

        rows = jnp.arange(len(view_of)), layer_numbers(model.decoder)
        (x_BTD, view), _ = over_layers(model.runs, one, (x_BTD, views[0]), params, rows, unroll=unroll)
        return x_BTD, [view]

    def keyed(kind: Kind, carry: _Carries, block: Block, place: jax.Array) -> tuple[_Carries, Outputs]:
        own, (at, numbers) = kind.layer
        x_BTD, views = carry
        (x_BTD, view), outputs = layer(own, (x_BTD, views[at]), block, (place, numbers))
        return (x_BTD, (*views[:at], view, *views[at + 1 :])), outputs

    keys = list(zip(view_of, static_numbers(model.decoder), strict=True))
    places = jnp.asarray([view_of[:number].count(at) for number, at in enumerate(view_of)])
    start: _Carries = x_BTD, tuple(views)
    return by_row(model.runs, keys, keyed, start, params, places, unroll=unroll)


def _one_by_one(
    model: LayeredModel,
    layer: Callable[..., _Computed],
    x_BTD: jax.Array,
    views: Views,
    view_of: Sequence[int],
    params: tuple[Block, ...],
    query_index_B: jax.Array | None,
) -> _Carries:
    """The layers one after the other, each with its own arrays. The last computes only the queries of
    `query_index_B`."""
    views = list(views)
    # layers of one kind are traced once
    jitted = {kind: jax.jit(functools.partial(layer, kind)) for kind in model.decoder.kinds}
    numbers = layer_numbers(model.decoder)

    def one(kind: Kind, x_BTD: jax.Array, block: Block, number: int) -> tuple[jax.Array, Outputs]:
        at, row = view_of[number], (0, jax.tree.map(lambda x: x[number], numbers))
        query = query_index_B if number == len(params) - 1 else None
        (x_BTD, views[at]), outputs = jitted[kind.layer]((x_BTD, views[at]), block, row, query)
        return x_BTD, outputs

    return over_layers(model.runs, one, x_BTD, params, range(len(params)))[0], views


def _bind(
    view: KeyValueView | None,
    layer: jax.Array,
    positions_BT: jax.Array,
    bias_BHTS: jax.Array | None,
    query_index_B: jax.Array | None,
    windows: Windows,
) -> context.Whole | Cached:
    """The attention of one layer: to the sequence itself, or to the keys and values of a view."""
    if view is None:
        return context.attention(bias_BHTS, windows=windows)
    if query_index_B is None:
        return Cached(view, layer, positions_BT, positions_BT, bias_BHTS)
    if bias_BHTS is not None:
        bias_BHTS = at_position(bias_BHTS.swapaxes(1, 2), query_index_B).swapaxes(1, 2)
    return Cached(view, layer, positions_BT, at_position(positions_BT, query_index_B), bias_BHTS)


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """The sharding of the residual stream between blocks."""
    return constrain(x_BTD, "batch", "block_seq", "act_embed")
