"""The tensors of other programs that hold a model's parameters, as rows of a table by which foreign checkpoints are
read and written."""

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mesh_transformer.spec.decoder import Decoder

TRANSPOSED = "f d -> d f"


class Split(enum.Enum):
    """How the arrays of a classic checkpoint's shards make up the whole array."""

    ROWS = "concatenated along the first dimension"
    COLUMNS = "concatenated along the last dimension"
    SUM = "summed: a bias that every shard adds before the sum over shards"
    FIRST = "the array of the first shard; the original never uses the others"
    MEAN = "averaged"
    UNUSED = "stored by the original but never used; it has the shape of `parameter` but is another array"
    COUNT = "an int32 scalar, the same in every shard"


class Tensor(NamedTuple):
    """A row of a table: a parameter of this program and the tensor of a foreign format that holds it.

    A row under blocks/ stands for all layers that have the parameter: the parameter has a leading dimension of layers,
    and the foreign format has one tensor for each layer. With {e} in the foreign name, the parameter has a second
    dimension of experts, and the foreign format has one tensor for each layer and expert. The table has no shapes: the
    model's parameters have them.
    """

    # path of the parameter below params/
    parameter: str
    # name of the foreign tensor, with {} for the number of the layer and {e} for the number of the expert
    foreign: str
    # einops pattern from the foreign tensor to the parameter, inverted for writing; with `part` the result begins with
    # the dimension `part`
    view: str | None = None
    # index of the parameter in the foreign tensor, if that holds several parameters
    part: int | None = None
    # the sizes that `view` needs; "part": the number of parameters in the foreign tensor
    sizes: Mapping[str, int] = {}
    # the number of rows of a foreign tensor that several parameters of unequal size share: this parameter holds the
    # rows from `first_row` on, and `view` is None or TRANSPOSED
    of_rows: int | None = None
    first_row: int = 0
    # the dimension that is padded in the parameter, and not in the foreign tensor
    vocab_axis: int | None = None
    # another parameter, without a foreign tensor: it is read as zeros, and writing adds it to the rows of this one
    bias: str | None = None
    # the foreign tensor to read instead, if config.json ties the head
    tied: str | None = None
    # a foreign tensor that may be stored too, and is then equal to this one
    copy: str | None = None
    # the layers that are the rows of the parameter, ascending (`by_stack`); None for all layers
    layers: tuple[int, ...] | None = None
    # how classic shards split it
    split: Split = Split.ROWS

    @property
    def stacked(self) -> bool:
        """Whether the parameter has a leading dimension of layers."""
        return self.parameter.startswith("blocks/")

    @property
    def stack_rank(self) -> int:
        """The number of leading dimensions of the parameter that a foreign tensor does not have: layers, experts."""
        return self.stacked + ("{e}" in self.foreign)

    def layer(self, place: Sequence[int]) -> int:
        """The layer at an index of these dimensions; 0 if there are none."""
        if not place:
            return 0
        return place[0] if self.layers is None else self.layers[place[0]]

    def name(self, place: Sequence[int]) -> str:
        """The name of the foreign tensor at an index of these dimensions."""
        return self.foreign.format(self.layer(place), e=place[-1]) if place else self.foreign


def by_stack(rows: Iterable[Tensor], decoder: Decoder) -> list[Tensor]:
    """The rows for the stacks of a decoder. A parameter of the layers has a stack, and so a row, for each
    group of layers."""
    of_stacks = []
    for row in rows:
        if not row.stacked:
            of_stacks.append(row)
            continue
        stacks = decoder.stacks[row.parameter.removeprefix("blocks/")]
        of_stacks += [row._replace(parameter=f"blocks/{path}", layers=layers) for path, layers in stacks]
    return of_stacks
