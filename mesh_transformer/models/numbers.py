"""The numbers in which layers of one kind differ, as data of the loop over layers: windows and rotary encodings.

Shapes: B sequences, T positions, R rotated dims, L layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.models.stack import row_of
from mesh_transformer.ops.rotary import Rotation, rotation
from mesh_transformer.spec import Decoder, Rotary

# The window of a layer without one, among layers that have windows: more than any position.
NO_WINDOW = 1 << 30
Number = jax.Array | int | None
"""Data of the program, or known before; None: there is none."""


class LayerNumbers(NamedTuple):
    """The numbers of one layer, as data; or of all layers, each with a leading dimension L."""

    # int32: `Context.window`; None: no layer has one
    window: Number
    # int32: the index of its rotary encoding among the encodings of its kind; None: no kind has several
    rotation: Number
    # int32: which layer it is; None: nothing depends on it
    layer: Number = None


def static_numbers(decoder: Decoder) -> tuple[LayerNumbers, ...]:
    """The numbers of each layer, as Python numbers; None: no window, no rotation."""
    found = []
    for window, rotary in decoder.numbers:
        found.append(LayerNumbers(window, None if rotary is None else decoder.rotaries[rotary.kind].index(rotary)))
    return tuple(found)


def layer_numbers(decoder: Decoder, *, counted: bool = False) -> LayerNumbers:
    """The numbers of all layers, as arrays (L,). The windows are None if no layer has one; the rotations are None if
    every kind has one encoding.

    Args:
        counted: with `LayerNumbers.layer`.
    """
    each = static_numbers(decoder)
    windows = [NO_WINDOW if one.window is None else one.window for one in each]
    rotations = [one.rotation or 0 for one in each]
    return LayerNumbers(
        jnp.asarray(windows, jnp.int32) if any(one.window for one in each) else None,
        jnp.asarray(rotations, jnp.int32) if any(rotations) else None,
        jnp.arange(len(each)) if counted else None,
    )


def rotations(decoder: Decoder, positions_BT: jax.Array) -> tuple[Rotation, ...]:
    """The rotary angles of the positions, for each kind of rotary encoding. If a kind has several encodings, their
    angles are stacked: (number of encodings, B, T, R / 2)."""
    found = []
    for several in decoder.rotaries.values():
        angles = [rotation(one, positions_BT, decoder.seq) for one in several]
        found.append(angles[0] if len(angles) == 1 else jax.tree.map(lambda *x: jnp.stack(x), *angles))
    return tuple(found)


def rotation_of(decoder: Decoder, kind: Rotary | None, angles: Sequence[Rotation], number: Number) -> Rotation | None:
    """The angles of one layer.

    Args:
        kind: the kind of its rotary encoding; None: it has none.
        angles: the result of `rotations`.
        number: `LayerNumbers.rotation` of the layer.
    """
    if kind is None:
        return None
    of_kind: Rotation = angles[list(decoder.rotaries).index(kind)]
    return of_kind if number is None or len(decoder.rotaries[kind]) == 1 else row_of(of_kind, number)
