"""Finds the stacks of layers that a model reads in a file of any version.

Earlier versions had one stack for each parameter, over all layers that have it: `params/blocks/attention/q/w`. A model
with several runs of layers has one for each run: `params/blocks/0/attention/q/w`, `params/blocks/1/attention/q/w`.
These are consecutive rows of the earlier stack.
"""

from collections.abc import Mapping
from typing import NamedTuple

from mesh_transformer.checkpoint.native.manifest import TensorSpec
from mesh_transformer.spec import Decoder


class Rows(NamedTuple):
    """Where the rows of a tensor are: in a stored tensor, from its row `first` on."""

    stored: str
    first: int = 0


def find_rows(tensors: Mapping[str, TensorSpec], decoder: Decoder | None) -> dict[str, tuple[Rows, TensorSpec]]:
    """The tensors that a file offers, by name: those that it stores, with each earlier stack cut for the decoder's
    runs.

    The spec of a part has the checksum of the whole stack. A stack that does not have the decoder's layers stays whole.

    Args:
        decoder: the model to read; None: all tensors as they are stored.
    """
    return {
        name: (rows, spec) for stored, whole in tensors.items() for name, rows, spec in _parts(stored, whole, decoder)
    }


def _parts(stored: str, spec: TensorSpec, decoder: Decoder | None) -> list[tuple[str, Rows, TensorSpec]]:
    prefix, found, inside = stored.partition("/blocks/")
    whole = [(stored, Rows(stored), spec)]
    # a stack of one run begins with its number
    if decoder is None or not found or inside.partition("/")[0].isdecimal():
        return whole
    stacks = decoder.stacks.get(inside, [])
    if spec.shape[:1] != (sum(len(layers) for _, layers in stacks),):
        return whole
    parts, first = [], 0
    for path, layers in stacks:
        parts.append(
            (f"{prefix}/blocks/{path}", Rows(stored, first), spec._replace(shape=(len(layers), *spec.shape[1:])))
        )
        first += len(layers)
    return parts
