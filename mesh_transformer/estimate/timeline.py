"""The time of a program that was compiled for an accelerator, estimated from its optimized text.

The schedule is played through: instructions run one after the other in the order of the text; a collective or a copy
that begins with `-start` runs beside them, and `-done` waits for its end; a loop is its body times its trips. The time
of an instruction is the compiler's own estimate of its cycles; where the compiler has none, it is the time to move its
bytes or to multiply, whichever is longer.

An estimate does not see the true clock, contention between transfers and compute, the host, or delays of the network
between slices: docs/preflight.md compares it with published runs.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from mesh_transformer.accelerators import Accelerator
from mesh_transformer.estimate.collectives import collective_seconds, device_group, slice_seconds
from mesh_transformer.estimate.hlo import Crossing, Instruction, Module
from mesh_transformer.estimate.kernels import OTHER_SHARE, SHARES, is_kernel, kernel_flops

Part = Literal["products", "attention", "element-wise", "head", "optimizer", "collectives", "waiting"]
PARTS: tuple[Part, ...] = get_args(Part)
"""products: matrix products of the layers. attention: products of queries, keys and values, softmax, rotary encoding.
element-wise: norms, activations, sums, copies. head: final norm, logits and loss, or sampling. optimizer: update and
accumulation of gradients. collectives: communication that runs alone. waiting: for communication and copies that run
beside other work."""

# Instructions that take no time on the device.
_FREE = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id", "replica-id",
    "opt-barrier", "iota", "add-dependency", "domain", "copy-done", "slice-done", "async-done",
}  # fmt: skip
# the names of transformations around a name, such as "transpose(jvp(" and "))"
_TRANSFORMED = re.compile(r"\w+\(|\)")
# The shares of the peak and of the memory's rate that large operations reach where the compiler has no estimates.
_PRODUCT_SHARE, _MEMORY_SHARE = 0.75, 0.85


class Spent(NamedTuple):
    """The time of one instruction in one run of the program."""

    part: Part
    # how often it runs
    runs: int
    # of all these runs
    seconds: float


@dataclass(frozen=True)
class ProgramEstimate:
    """The predicted time of a program."""

    seconds: float
    # by the name of the instruction
    spent: dict[str, Spent]
    # loops whose number of trips the text does not tell: they count once
    unknown_loops: tuple[str, ...]

    @property
    def parts(self) -> dict[Part, float]:
        """Seconds by part; their sum is `seconds`."""
        total: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        for spent in self.spent.values():
            total[spent.part] += spent.seconds
        return total


@dataclass
class _Played:
    """The time of a computation, in one run: its length, and for each instruction the count and the seconds."""

    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, name: str, seconds: float) -> None:
        """An instruction that ends so much later."""
        self.seconds += seconds
        self.counts[name] += 1
        self.spent[name] += seconds

    def include(self, inner: "_Played", times: int = 1) -> None:
        """A computation that runs so often."""
        self.seconds += inner.seconds * times
        for name, count in inner.counts.items():
            self.counts[name] += count * times
            self.spent[name] += inner.spent[name] * times


class Timeline:
    """Plays the schedule of a program.

    Args:
        hlo: the optimized text of the program.
        loops: trip counts by a name in the op_name of a loop, for loops whose text has no trip count.
        slices: TPU slices that run the program together.
    """

    def __init__(self, hlo: str, accelerator: Accelerator, loops: Mapping[str, int] | None = None, slices: int = 1):
        self.module, self.accelerator, self.slices = Module(hlo), accelerator, slices
        self._loops = loops or {}
        self._parts: dict[str, Part] = {}
        self._unknown: list[str] = []
        self._trains = "jvp(" in hlo

    def estimate(self) -> ProgramEstimate:
        """Play the program once."""
        played = self._play(self.module.entry, ())
        spent = {name: Spent(self._parts[name], played.counts[name], seconds) for name, seconds in played.spent.items()}
        return ProgramEstimate(played.seconds, spent, tuple(self._unknown))

    def flops(self, instruction: Instruction) -> int:
        """Operations of the matrix products in an instruction, also of a kernel: 2 for each pair of elements."""
        return self.module.flops(instruction) or kernel_flops(self.module, instruction)

    def _play(self, computation: str, loops: tuple[str, ...]) -> _Played:
        played = _Played()
        # when the transfers that have started end, by the name of the instruction that stands for them
        ends: dict[str, float] = {}
        links = _Links()
        for instruction in self.module.computations.get(computation, ()):
            if instruction.opcode == "while":
                body = self._play(instruction.attribute("body") or "", (*loops, instruction.op_name))
                played.include(body, self._trips(instruction))
            elif instruction.opcode == "call" and instruction.cycles is None:
                played.include(self._play(instruction.attribute("to_apply") or "", loops))
            elif instruction.opcode == "conditional":
                branches = [self._play(name, loops) for name in instruction.called]
                played.include(max(branches, key=lambda branch: branch.seconds))
            elif instruction.crossing is not None:
                if instruction.opcode == "send":
                    ends[instruction.crossing.name] = links.send(
                        "slices", self._crossing_seconds(instruction.crossing), played.seconds
                    )
            elif self._is(instruction, "start"):
                ends[instruction.name] = links.send(*self._transfer(instruction), played.seconds)
            elif self._is(instruction, "done"):
                end = max((ends.get(name, 0.0) for name in self._awaited(instruction)), default=0.0)
                self._add(played, instruction, "waiting", max(end - played.seconds, 0.0))
            elif self._collective(instruction) is not None:
                self._add(
                    played,
                    instruction,
                    "collectives",
                    links.send(*self._transfer(instruction), played.seconds) - played.seconds,
                )
            else:
                source = next(iter(instruction.operands), "")
                # it stands for a transfer that runs: async-update, or a tuple or bitcast of it
                if source in ends:
                    ends[instruction.name] = ends[source]
                if instruction.opcode not in _FREE:
                    self._add(played, instruction, self._part(instruction, loops), self._seconds(instruction))
        return played

    def _add(self, played: _Played, instruction: Instruction, part: Part, seconds: float) -> None:
        if seconds:
            self._parts[instruction.name] = part
            played.add(instruction.name, seconds)

    def _trips(self, loop: Instruction) -> int:
        trips = self.module.trips(loop) or next((n for name, n in self._loops.items() if name in loop.op_name), None)
        if trips is None:
            self._unknown.append(f"{loop.name} ({loop.op_name})")
        return trips or 1

    def _is(self, instruction: Instruction, end: Literal["start", "done"]) -> bool:
        """Whether an instruction starts, or waits for, a transfer beside other work. libtpu may fuse it."""
        inner = self.module.root(instruction)
        return inner.opcode.endswith(f"-{end}") or f'"AsyncCollective{end.capitalize()}"' in inner.rest

    def _awaited(self, done: Instruction) -> list[str]:
        """The transfer that an instruction waits for."""
        received = [
            operand.crossing.name
            for operand in self.module.operands(done)
            if operand.opcode == "recv" and operand.crossing
        ]
        return received or done.operands[:1]

    def _crossing_seconds(self, crossing: Crossing) -> float:
        """Seconds of a transfer between slices, from its larger end."""
        ends = (end for end in self.module.instructions.values() if end.crossing == crossing)
        nbytes = max(array.nbytes for end in ends for array in end.arrays)
        return slice_seconds(crossing.kind, nbytes, self.slices, self.accelerator)

    def _collective(self, instruction: Instruction) -> Instruction | None:
        """The collective that an instruction is, starts or wraps."""
        # what has an estimate computes, such as a product into which libtpu fuses a part of a running collective
        if (
            instruction.kind
            or instruction.cycles is not None
            or instruction.opcode not in ("fusion", "async-start", "custom-call")
        ):
            return instruction if instruction.kind else None
        return next((inner for inner in self.module.inside(instruction) if inner.kind), None)

    def _transfer(self, instruction: Instruction) -> tuple[str, float]:
        """The way and the seconds of a collective, or of a copy that runs beside other work."""
        collective = self._collective(instruction)
        if collective is None:
            sizes = [array.nbytes for array in instruction.arrays if array.shape]
            moved = min(sizes, default=0) if instruction.opcode == "slice-start" else max(sizes, default=0)
            return "copies", moved / (1e9 * self.accelerator.memory_gb_s)
        sizes = [array.nbytes for array in collective.arrays]
        # the result of a start is a tuple of operands, results and buffers
        result = max(sizes, default=0) if collective.opcode.endswith("-start") else sum(sizes)
        nbytes, kind = max(result, self.module.operand_bytes(collective)), collective.kind or ""
        # libtpu writes a reduce-scatter as a fusion of an all-reduce and a slice of its result, or of several
        root = self.module.root(instruction)
        results = list(self.module.operands(root)) if root.opcode == "tuple" else [root]
        if kind == "all-reduce" and {result.opcode for result in results} == {"dynamic-slice"}:
            kind = "reduce-scatter"
        group = device_group(collective.rest)
        return _way(collective), collective_seconds(kind, nbytes, group, self.accelerator)

    def _seconds(self, instruction: Instruction) -> float:
        """Seconds of an instruction that runs alone."""
        if instruction.cycles is not None and self.accelerator.is_tpu:
            return instruction.cycles / (1e9 * self.accelerator.clock_ghz)
        if instruction.opcode == "custom-call" and self.accelerator.is_tpu and not is_kernel(instruction):
            return 0.0
        moved = self.module.moved_bytes(instruction) / (1e9 * self.accelerator.memory_gb_s)
        product = self.flops(instruction) / (1e12 * self.accelerator.peak_tflops)
        share = SHARES.get(self.accelerator.name, OTHER_SHARE)
        if self.accelerator.is_tpu:
            return max(moved, product / share) if is_kernel(instruction) else moved
        return max(moved / _MEMORY_SHARE, product / (share if is_kernel(instruction) else _PRODUCT_SHARE))

    def _part(self, instruction: Instruction, loops: tuple[str, ...]) -> Part:
        name = "/".join((*loops, instruction.op_name))
        if "blocks" not in name:
            if not self._trains or "jvp(" in name:
                return "element-wise" if "(tokens)" in name or instruction.opcode == "copy" else "head"
            return "optimizer"
        # in a pipeline, whose stages differentiate each layer, "jvp(attention)"
        pieces = _TRANSFORMED.sub("", name).split("/")
        if "attention" in pieces and not {"q", "k", "v", "o"} & set(pieces):
            return "attention"
        return "products" if self.flops(instruction) else "element-wise"


class _Links:
    """The links and the copy engine of a device. Transfers on the same way are serialized."""

    def __init__(self) -> None:
        self._free: dict[str, float] = {}

    def send(self, way: str, seconds: float, now: float) -> float:
        """When a transfer ends that starts now, or as soon as its way is free."""
        self._free[way] = max(self._free.get(way, 0.0), now) + seconds
        return self._free[way]


def _way(collective: Instruction) -> str:
    """A permutation uses the links of one direction only: up if most devices send to one with a higher number."""
    pairs = re.search(r"source_target_pairs=\{([\d,{}]+)\}", collective.rest)
    if pairs is None:
        return "links"
    ups = [int(target) > int(source) for source, target in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")]
    return "links up" if 2 * sum(ups) >= len(ups) else "links down"
