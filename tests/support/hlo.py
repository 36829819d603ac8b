"""The instructions of a compiled program, and its collectives, read from its text (`compiled.as_text()`)."""

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
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
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


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    result: str  # its type, such as "f32[4,8]{1,0}", or a tuple of types
    opcode: str
    rest: str  # operands and attributes

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it yields on one device."""
        found = _ARRAY.findall(self.result)
        return tuple(Array(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in found)

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from; empty if that is not known."""
        name = _OP_NAME.search(self.rest)
        return name[1] if name else ""


class Collective(NamedTuple):
    """One communication: several arrays where the compiler combined several into one."""

    kind: str  # of KINDS; an asynchronous one counts once
    arrays: tuple[Array, ...]  # what it yields on one device
    loops: tuple[str, ...]  # the op_names of the loops around it, outermost first

    @property
    def nbytes(self) -> int:
        """Bytes that it yields on one device each time it runs."""
        return sum(array.nbytes for array in self.arrays)


def computations(hlo: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation of an optimised HLO module, in the order of its text.

    Raises:
        ValueError: the text holds no computation: it is not an HLO module.
    """
    found: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in hlo.splitlines():
        if header := _HEADER.match(line):
            body = found.setdefault(header[1], [])
        elif instruction := _INSTRUCTION.match(line):
            body.append(Instruction(*instruction.groups()))
    if not found:
        raise ValueError("this text has no computation: it is not an HLO module")
    return found


def collectives(hlo: str) -> list[Collective]:
    """Every collective of an optimised HLO module, in the order of its text.

    Raises:
        ValueError: as in `computations`.
    """
    bodies = computations(hlo)
    callers: dict[str, tuple[str, str | None]] = {}  # computation -> who calls it, and the loop if it is one
    for computation, body in bodies.items():
        for instruction in body:
            loop = instruction.op_name if instruction.opcode == "while" else None
            for one, several in _CALLED.findall(instruction.rest):
                for callee in (one or several).split(", "):
                    callers[callee.lstrip("%")] = (computation, loop)
    return [
        Collective(kind, instruction.arrays, _loops(computation, callers))
        for computation, body in bodies.items()
        for instruction in body
        if (kind := instruction.opcode.removesuffix("-done")) in KINDS
    ]


def _loops(computation: str, callers: dict[str, tuple[str, str | None]]) -> tuple[str, ...]:
    loops: list[str] = []
    while computation:
        computation, loop = callers.get(computation, ("", None))
        if loop is not None:
            loops.insert(0, loop)
    return tuple(loops)
