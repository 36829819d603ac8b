"""The collectives of a compiled program, read from its text (`compiled.as_text()`)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|(?:true|false)_computation)=(%?[\w.-]+)"
    r"|\b(?:branch|called)_computations=\{([^}]*)\}"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")


class Array(NamedTuple):
    """The dtype, as the program spells it ("bf16"), and the shape on one device."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without padding."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * (int(bits[0]) if bits else 8) // 8  # pred has no number and takes a byte


class Collective(NamedTuple):
    """One communication: several arrays where the compiler combined several into one."""

    kind: str  # of KINDS; an asynchronous one counts once
    arrays: tuple[Array, ...]  # what it yields on one device
    loops: tuple[str, ...]  # the op_names of the loops around it, outermost first

    @property
    def nbytes(self) -> int:
        """Bytes that it yields on one device each time it runs."""
        return sum(array.nbytes for array in self.arrays)


def collectives(hlo: str) -> list[Collective]:
    """Every collective of an optimised HLO module, in the order of its text.

    Raises:
        ValueError: the text holds no computation: it is not an HLO module.
    """
    computation = ""
    callers: dict[str, tuple[str, str | None]] = {}  # computation -> who calls it, and the loop if it is one
    found: list[tuple[str, str, str]] = []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            computation = header[1]
            callers.setdefault(computation, ("", None))
        elif instruction := _INSTRUCTION.match(line):
            result, opcode = instruction.groups()
            name = _OP_NAME.search(line)
            loop = (name[1] if name else "") if opcode == "while" else None
            for one, several in _CALLED.findall(line):
                for callee in (one or several).split(", "):
                    callers[callee.lstrip("%")] = (computation, loop)
            found.append((opcode.removesuffix("-done"), result, computation))
    if not callers:
        raise ValueError("this text has no computation: it is not an HLO module")
    return [
        Collective(kind, _arrays(result), _loops(where, callers))
        for kind, result, where in found
        if kind in KINDS
    ]


def _arrays(result: str) -> tuple[Array, ...]:
    found = _ARRAY.findall(result)
    return tuple(Array(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found)


def _loops(computation: str, callers: dict[str, tuple[str, str | None]]) -> tuple[str, ...]:
    loops: list[str] = []
    while computation:
        computation, loop = callers.get(computation, ("", None))
        if loop is not None:
            loops.insert(0, loop)
    return tuple(loops)
