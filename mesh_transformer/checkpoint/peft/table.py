"""Which adapters of a model a pair of PEFT is, by the family's table of tensors: for reading and writing.

Shapes: D inputs, F outputs of a matrix, R rank.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mesh_transformer.checkpoint.hf.source import export_tensor, foreign_shape, import_tensor, stacked_rows
from mesh_transformer.checkpoint.tensors import unpadded_shape
from mesh_transformer.config import ModelConfig
from mesh_transformer.spec import Array, Tensor

GATE_UP, DOWN = "gate_up_proj", "down_proj"
ROUTER = "ff/router/w"


class Member(NamedTuple):
    """A matrix of the layers: its path, such as `attention/q/w`, the row of its first stack, and the matrix as the
    modules of a layer read it."""

    path: str
    row: Tensor
    array: Array


class Group(NamedTuple):
    """The matrices that are one matrix in transformers, in its order. It has one pair, whose a they share; it is stored
    with the matrix at `owner`."""

    members: tuple[Member, ...]
    owner: str

    @property
    def of_experts(self) -> bool:
        """Whether they are the matrices of routed experts."""
        return "{e}" in self.members[0].row.foreign

    @property
    def experts(self) -> int:
        """Routed experts of a layer."""
        return self.members[0].array.shape[0]

    @property
    def parameter(self) -> str:
        """Of routed experts: the name of the parameter in which transformers 5 has the matrices of all of them."""
        return DOWN if self.members[0].path.endswith("/out") else GATE_UP

    @property
    def inputs_first(self) -> bool:
        """Whether transformers stores the matrix as (inputs, outputs), in a Conv1D."""
        return _input_axis(self.members[0]) == 0

    def module(self, layer: int, expert: int = 0) -> str:
        """The module of a layer, and of an expert, in transformers 4; or of the only matrix of experts."""
        return self.members[0].row.foreign.format(layer, e=expert).removesuffix(".weight")


def groups_of(model: ModelConfig) -> list[Group]:
    """The groups of the matrices that have names in transformers, in the order of the model."""
    decoder = model.decoder()
    matrices = decoder.matrices_by_path
    first_stacks = {f"blocks/{stacks[0][0]}": path for path, stacks in decoder.stacks.items() if path in matrices}
    groups: dict[str, list[Member]] = {}
    for row in stacked_rows(model):
        path = first_stacks.get(row.parameter)
        if path is not None:
            # transformers has gate and in of an expert in one parameter
            joined = "{e}" in row.foreign and not path.endswith("/out")
            groups.setdefault(GATE_UP if joined else row.foreign, []).append(Member(path, row, matrices[path]))
    order = list(matrices)
    return [
        Group(
            tuple(sorted(group, key=lambda member: (member.row.part or 0, member.row.first_row))),
            min((member.path for member in group), key=order.index),
        )
        for group in groups.values()
    ]


def sides(member: Member, model: ModelConfig) -> tuple[int, int]:
    """Inputs and outputs of the foreign matrix that holds a matrix."""
    shape = foreign_shape(member.row, model)
    inputs = _input_axis(member)
    return shape[inputs], shape[1 - inputs]


def b_of(member: Member, b_FR: np.ndarray, model: ModelConfig) -> np.ndarray:
    """b of a matrix, in its shape with R in the place of D, from b of the foreign matrix that holds it."""
    row, at = member.row, _dims(member).index("i")
    shape = list(unpadded_shape(row, model))
    shape[at] = b_FR.shape[1]
    if row.of_rows is not None:
        b_FR = b_FR[row.first_row : row.first_row + shape[1 - at]]
    return import_tensor(row, b_FR if _input_axis(member) else b_FR.T, tuple(shape))


def joined_b(group: Group, bs: Sequence[np.ndarray]) -> np.ndarray:
    """The inverse of `b_of`: (F, R) of the foreign matrix, from the b's of all matrices in it."""
    first = group.members[0]
    if first.row.part is None:
        foreign = [export_tensor(member.row, b) for member, b in zip(group.members, bs, strict=True)]
    else:
        foreign = [export_tensor(first.row, np.stack(bs))]
    return np.concatenate([b if _input_axis(first) else b.T for b in foreign])


def _dims(member: Member) -> str:
    """The dimensions of the part of the parameter that one foreign tensor holds."""
    return member.array.dims.replace("e", "")


def _input_axis(member: Member) -> int:
    """The dimension of the inputs in the foreign matrix: 1, or 0 of a Conv1D."""
    dims, view = _dims(member), member.row.view
    if view is None:
        return dims.index("i")
    foreign, ours = (re.findall(r"\([^)]*\)|\S+", side) for side in view.split("->"))
    inputs = [name for name in ours if name != "part"][dims.index("i")]
    return foreign.index(inputs)
