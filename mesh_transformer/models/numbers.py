"""The numbers in which layers of one kind differ, as data of the loop over layers: windows and position encodings.

Shapes: B sequences, T positions, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.models.stack import row_of
from mesh_transformer.ops.positions import ENCODINGS, EncodedPositions
from mesh_transformer.spec import Decoder, PositionEncoding

# The window of a layer without one, among layers that have windows: more than any position.
NO_WINDOW = 1 << 30
Number = jax.Array | int | None
"""Data of the program, or known before; None: there is none."""


class LayerNumbers(NamedTuple):
    """The numbers of one layer, as data; or of all layers, each with a leading dimension L."""

    # int32: `Context.window`; None: no layer has one
    window: Number
    # int32: the index of its position encoding among the encodings of its kind; None: no kind has several
    encoding: Number
    # int32: which layer it is; None: nothing depends on it
    layer: Number = None


def static_numbers(decoder: Decoder) -> tuple[LayerNumbers, ...]:
    """The numbers of each layer, as Python numbers; None: no window, no position encoding."""
    found = []
    for window, one in decoder.numbers:
        encoding = None if one is None else decoder.position_encodings[one.kind].index(one)
        found.append(LayerNumbers(window, encoding))
    return tuple(found)


def layer_numbers(decoder: Decoder, *, counted: bool = False) -> LayerNumbers:
    """The numbers of all layers, as arrays (L,). The windows are None if no layer has one; the encodings are None
    if every kind has one.

    Args:
        counted: with `LayerNumbers.layer`.
    """
    each = static_numbers(decoder)
    windows = [NO_WINDOW if one.window is None else one.window for one in each]
    encodings = [one.encoding or 0 for one in each]
    return LayerNumbers(
        jnp.asarray(windows, jnp.int32) if any(one.window for one in each) else None,
        jnp.asarray(encodings, jnp.int32) if any(encodings) else None,
        jnp.arange(len(each)) if counted else None,
    )


def encoded_positions(decoder: Decoder, positions_BT: jax.Array) -> tuple[EncodedPositions, ...]:
    """The arrays of the positions, for each kind of position encoding. If a kind has several encodings, their arrays
    are stacked: (number of encodings, B, T, ...)."""
    found = []
    for kind, several in decoder.position_encodings.items():
        each = [ENCODINGS[type(kind)].positions(one, positions_BT, decoder.seq) for one in several]
        found.append(each[0] if len(each) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *each))
    return tuple(found)


def positions_of(
    decoder: Decoder, kind: PositionEncoding | None, encoded: Sequence[EncodedPositions], number: Number
) -> EncodedPositions | None:
    """The arrays of the positions for one layer.

    Args:
        kind: the kind of its position encoding; None: it has none.
        encoded: the result of `encoded_positions`.
        number: `LayerNumbers.encoding` of the layer.
    """
    if kind is None:
        return None
    of_kind: EncodedPositions = encoded[list(decoder.position_encodings).index(kind)]
    return of_kind if number is None or len(decoder.position_encodings[kind]) == 1 else row_of(of_kind, number)
