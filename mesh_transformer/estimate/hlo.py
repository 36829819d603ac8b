"""The instructions of a compiled program, and its collectives, read from its text (`compiled.as_text()`)."""

import functools
import math
import re
from collections.abc import Iterator, Mapping
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
# the kinds of transfers between TPU slices, in the words of their runtime
_BETWEEN_SLICES = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
    "REDUCE_SCATTER": "reduce-scatter",
}

# instructions that read a slice of their first operand, that update a slice of it, and that only reinterpret it
_SLICES = ("slice", "dynamic-slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast",)

_HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
_CALLED = re.compile(
    r"\b(?:body|condition|calls|to_apply|(?:true|false)_computation)=(%?[\w.-]+)"
    r"|\b(?:branch|called)_computations=\{([^}]*)\}"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_MEGASCALE = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)".*_xla_megascale_transfer_type="(\w+)"')
# libtpu breaks the line of a Pallas kernel within its metadata
BREAK = re.compile(r'\n(?="|\}\})')
_WINDOW = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")


class HloArray(NamedTuple):
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
        # pred has no number and takes a byte
        return self.size * (int(bits[0]) if bits else 8) // 8


class Crossing(NamedTuple):
    """A transfer between TPU slices: a `send` of the operand and a `recv` of the result."""

    # one name for its `send` and its `recv`
    name: str
    # of KINDS
    kind: str


class Instruction(NamedTuple):
    """A line of a computation."""

    name: str
    # its type, such as "f32[4,8]{1,0}", or a tuple of types
    result: str
    opcode: str
    # operands and attributes
    rest: str

    @property
    def arrays(self) -> tuple[HloArray, ...]:
        """The arrays of its result on one device."""
        arrays = _ARRAY.findall(self.result)
        return tuple(HloArray(dtype, tuple(int(d) for d in dims.split(",") if d)) for dtype, dims in arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of its result on one device."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from; empty if that is not known."""
        name = _OP_NAME.search(self.rest)
        return name[1] if name else ""

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        depth = 1
        for end, character in enumerate(self.rest):
            depth += (character in "({") - (character in ")}")
            if depth == 0:
                return _OPERAND.findall(self.rest[:end])
        return []

    @property
    def called(self) -> list[str]:
        """The names of the computations that it calls; a `while` calls its condition and its body."""
        called = [single or several for single, several in _CALLED.findall(self.rest)]
        return [name.lstrip("%") for names in called for name in names.split(", ")]

    @property
    def cycles(self) -> int | None:
        """The compiler's own estimate of its time, in cycles of a TPU core; None if the text has no estimate."""
        match = _CYCLES.search(self.rest)
        return int(match[1]) if match else None

    @property
    def kind(self) -> str | None:
        """Its kind of KINDS if it is a collective or starts one, else None."""
        opcode = self.opcode.removesuffix("-start")
        return opcode if opcode in KINDS else None

    @property
    def crossing(self) -> Crossing | None:
        """The transfer between slices that it is an end of, if it is a `send` or a `recv` of one."""
        match = _MEGASCALE.search(self.rest) if self.opcode in ("send", "recv") else None
        return None if match is None else Crossing(match[1], _BETWEEN_SLICES[match[2]])

    def attribute(self, name: str) -> str | None:
        """The word after `name=`."""
        match = re.search(rf"\b{name}=%?([\w.-]+)", self.rest)
        return match[1] if match else None


class Collective(NamedTuple):
    """One communication: several arrays where the compiler combined several into one."""

    # of KINDS; an asynchronous one counts once
    kind: str
    # of the result on one device
    arrays: tuple[HloArray, ...]
    # the op_names of the loops around it, outermost first
    loops: tuple[str, ...]
    # whether it crosses from one TPU slice to another
    between_slices: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the result on one device, in one run."""
        return sum(array.nbytes for array in self.arrays)


class Overlap(NamedTuple):
    """The work that a program runs between the start and the end of a collective. A synchronous collective is one
    instruction, and both counts are 0."""

    collective: Collective
    # matrix products, alone or fused, and loops with products
    products: int
    # the compiler's estimates of the time of all instructions, in cycles of a TPU core
    cycles: int


class Module:
    """The computations of an optimized HLO module.

    Args:
        hlo: its text.

    Raises:
        ValueError: the text holds no computation: it is not an HLO module.
    """

    def __init__(self, hlo: str):
        self.computations: dict[str, list[Instruction]] = {}
        # the computation that runs first
        self.entry = ""
        body: list[Instruction] = []
        for line in BREAK.sub("", hlo).splitlines():
            if header := _HEADER.match(line):
                body = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif instruction := _INSTRUCTION.match(line):
                body.append(Instruction(*instruction.groups()))
        if not self.computations:
            raise ValueError("this text has no computation: it is not an HLO module")

    @functools.cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """All instructions by name."""
        return {instruction.name: instruction for body in self.computations.values() for instruction in body}

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that compute its operands."""
        return (self.instructions[name] for name in instruction.operands if name in self.instructions)

    def operand_bytes(self, instruction: Instruction) -> int:
        """Bytes of the arrays that it reads; tuples are not counted."""
        return sum(operand.nbytes for operand in self.operands(instruction) if not operand.result.startswith("("))

    def moved_bytes(self, instruction: Instruction) -> int:
        """Bytes that it reads and writes. Of an array that it slices or updates in place, only the slice counts."""
        if instruction.opcode != "fusion":
            read = 0 if instruction.opcode in (*_SLICES, *_UPDATES) else self.operand_bytes(instruction)
            return read + self._written_bytes(instruction)
        body = self.computations.get(instruction.attribute("calls") or "", [])
        read = sum(self._read_bytes(parameter, body) for parameter in body if parameter.opcode == "parameter")
        roots = list(self.operands(body[-1])) if body and body[-1].opcode == "tuple" else body[-1:]
        return read + sum(map(self._written_bytes, roots))

    def _read_bytes(self, source: Instruction, body: list[Instruction]) -> int:
        """Bytes that a fusion reads of a parameter: its slices if all users slice, update or reinterpret it, else the
        whole array. `_written_bytes` counts the reads of updates."""
        users = [user for user in body if source.name in user.operands]
        if not all(user.opcode in (*_SLICES, *_UPDATES, *_VIEWS) and user.operands[0] == source.name for user in users):
            return source.nbytes
        views = sum(self._read_bytes(user, body) for user in users if user.opcode in _VIEWS)
        return views + sum(user.nbytes for user in users if user.opcode in _SLICES)

    def _written_bytes(self, instruction: Instruction) -> int:
        """Bytes of a result, and the bytes that a slice, or the update of a slice, reads."""
        while instruction.opcode in _VIEWS and (source := next(self.operands(instruction), None)) is not None:
            instruction = source
        if instruction.opcode in _SLICES:
            return 2 * instruction.nbytes
        if instruction.opcode in _UPDATES:
            # the slice that replaces a part of the array: the second operand, and the last of a scatter
            place = -1 if instruction.opcode == "scatter" else 1
            return 2 * list(self.operands(instruction))[place].nbytes
        return instruction.nbytes

    def root(self, instruction: Instruction) -> Instruction:
        """The root instruction of a fusion. An instruction of another opcode is its own root."""
        body = self.computations.get(instruction.attribute("calls") or "", [])
        return body[-1] if instruction.opcode == "fusion" and body else instruction

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instructions that it fuses or calls, with the instructions of nested computations."""
        for name in instruction.called:
            for inner in self.computations.get(name, ()):
                yield inner
                yield from self.inside(inner)

    def trips(self, loop: Instruction) -> int | None:
        """The trip count of a `while`: the compiler's, else the bound in its condition; None if both are unknown."""
        if known := _TRIPS.search(loop.rest):
            return int(known[1])
        condition = self.computations.get(loop.attribute("condition") or "", [])
        wrapped = (inner for instruction in condition for inner in self.inside(instruction))
        bounds = {value for instruction in (*condition, *wrapped) if (value := _integer(instruction))}
        bounds |= set() if bounds else set(self._carried_bounds(loop, condition))
        return bounds.pop() if len(bounds) == 1 else None

    def _carried_bounds(self, loop: Instruction, condition: list[Instruction]) -> Iterator[int]:
        """The positive constants of the loop's initial state that its condition reads."""
        initial = self.instructions.get(next(iter(loop.operands), ""))
        if initial is None or initial.opcode != "tuple":
            return
        for instruction in condition:
            if instruction.opcode == "get-tuple-element":
                place = self.instructions.get(initial.operands[int(instruction.attribute("index") or 0)])
                if place is not None and (value := _integer(place)):
                    yield value

    def flops(self, instruction: Instruction) -> int:
        """Operations of the matrix products in an instruction: 2 for each pair of elements."""
        return sum(map(self._product_flops, (instruction, *self.inside(instruction))))

    def _product_flops(self, instruction: Instruction) -> int:
        if instruction.opcode not in ("dot", "convolution"):
            return 0
        left, right = (operand.arrays[0].shape for operand in list(self.operands(instruction))[:2])
        result = instruction.arrays[0]
        if instruction.opcode == "dot":
            contracted = _numbers(instruction.rest, "lhs_contracting_dims")
            return 2 * result.size * math.prod(left[d] for d in contracted)
        labels = _WINDOW.search(instruction.rest)
        if labels is None:
            return 0
        of_left, of_right, of_result = labels.groups()
        summed = left[of_left.index("f")]
        for label in filter(str.isdigit, of_left):
            # a dimension of the window's size that has one position in the result is summed
            n = left[of_left.index(label)]
            if result.shape[of_result.index(label)] == 1 and right[of_right.index(label)] == n:
                summed *= n
        return 2 * result.size * summed // int(instruction.attribute("feature_group_count") or 1)


def collectives(hlo: str) -> list[Collective]:
    """Every collective of an optimized HLO module, in the order of its text.

    Raises:
        ValueError: as in `Module`.
    """
    return [overlap.collective for overlap in overlaps(hlo)]


def collective_bytes(hlo: str) -> dict[str, int]:
    """The bytes that the collectives of each kind yield on one device in one run of an optimized HLO module.

    A collective in a loop counts once for each trip, or once if the trip count is unknown.

    Raises:
        ValueError: as in `Module`.
    """
    module, totals = Module(hlo), dict.fromkeys(KINDS, 0)

    def add(computation: str, times: int) -> None:
        for instruction in module.computations.get(computation, ()):
            if (kind := instruction.opcode.removesuffix("-done")) in KINDS:
                totals[kind] += times * instruction.nbytes
            turns = times * (module.trips(instruction) or 1) if instruction.opcode == "while" else times
            for name in instruction.called:
                add(name, turns)

    add(module.entry, 1)
    return {kind: total for kind, total in totals.items() if total}


def overlaps(hlo: str) -> list[Overlap]:
    """Every collective of an optimized HLO module with the work between its start and its end, in the order of the
    text: the order in which a scheduled program runs.

    Raises:
        ValueError: as in `Module`.
    """
    module = Module(hlo)
    bodies = module.computations
    # computation -> who calls it, and the loop if it is one
    callers: dict[str, tuple[str, str | None]] = {}
    for computation, body in bodies.items():
        for instruction in body:
            loop = instruction.op_name if instruction.opcode == "while" else None
            callers.update(dict.fromkeys(instruction.called, (computation, loop)))
    spans = []
    for computation, body in bodies.items():
        places = {instruction.name: place for place, instruction in enumerate(body)}
        crossings = {send.crossing: place for place, send in enumerate(body) if send.opcode == "send"}
        for place, instruction in enumerate(body):
            start, crossing = _start(instruction, places, place), None
            if instruction.opcode == "recv-done" and (crossing := body[start].crossing) is not None:
                start = crossings.get(crossing, start)
            kind = crossing.kind if crossing else instruction.opcode.removesuffix("-done")
            if kind in KINDS:
                collective = Collective(
                    kind, instruction.arrays, _loops(computation, callers), between_slices=crossing is not None
                )
                between = body[start + 1 : place]
                products = sum(module.flops(inner) > 0 for inner in between)
                spans.append(Overlap(collective, products, sum(inner.cycles or 0 for inner in between)))
    return spans


def _start(end: Instruction, places: Mapping[str, int], place: int) -> int:
    """The index of the instruction that starts a collective. A synchronous collective starts at its own index."""
    return places.get(next(iter(end.operands), ""), place) if end.opcode.endswith("-done") else place


def _loops(computation: str, callers: Mapping[str, tuple[str, str | None]]) -> tuple[str, ...]:
    loops: list[str] = []
    while computation:
        computation, loop = callers.get(computation, ("", None))
        if loop is not None:
            loops.insert(0, loop)
    return tuple(loops)


def _integer(instruction: Instruction) -> int | None:
    """The value of a positive integer constant."""
    if instruction.opcode != "constant" or not re.match(r"[su]32\[\]", instruction.result):
        return None
    value = re.match(r"\d+", instruction.rest)
    return int(value[0]) or None if value else None


def _numbers(rest: str, name: str) -> list[int]:
    match = re.search(rf"\b{name}=\{{([\d,]*)\}}", rest)
    return [int(number) for number in match[1].split(",") if number] if match else []
