"""Profile of a training step on CPU: time by part of the model and kind of operation, and the rate of the matrix
products.

    python benchmarks/profile_step.py [--config C] [--set k=v] [--plot profile.png] [--top 15]

Traces one step of the trainer's own program with JAX's profiler and looks each executed operation up in the optimized
HLO. XLA runs independent operations on several threads at once on CPU, so that the sum of thread seconds exceeds the
step time.
"""

import argparse
import collections
import glob
import math
import re
import tempfile
import timeit
from typing import Any, NamedTuple

import numpy as np
from common import OwnStep, config_of, parser, report, say

from mesh_transformer.estimate.hlo import HloArray, Instruction, Module

PARTS = ["head and loss", "attention", "layers: q, k, v, o, ff", "embedding and rest", "optimizer"]
KINDS = ["matrix products", "element by element", "sums and maxima", "copies and transposes"]
COLORS = ["#4c72b0", "#dd8452", "#55a868", "#c44e52"]


class Operation(NamedTuple):
    """One instruction of the optimized program."""

    part: str
    kind: str
    # of the matrix products in one execution
    flops: int


def main() -> None:
    made = parser(__doc__, rounds=None)
    made.add_argument("--plot", metavar="PNG", help="write a chart")
    made.add_argument("--top", type=int, default=12, help="number of longest operations to list (default: %(default)s)")
    arguments = made.parse_args()
    operations, events, seconds = trace(arguments)
    spent, flops = collections.Counter[tuple[str, str]](), collections.Counter[str]()
    for place, (name, durations) in enumerate(sorted(events.items(), key=lambda item: -sum(item[1]))):
        part, kind, each = operations[name]
        spent[part, kind] += sum(durations)
        flops[part] += each * len(durations)
        if place < arguments.top:
            say(f"{1e3 * sum(durations):9.1f} ms  {len(durations):4d} x  {part}: {kind}: {name}")
    total = spent.total()
    result = {
        "config": arguments.config,
        "step_seconds": round(seconds, 3),
        "thread_seconds": round(total, 3),
        "shares": {part: {kind: round(spent[part, kind] / total, 4) for kind in KINDS} for part in PARTS},
        "product_gflops_per_thread_second": {
            part: round(flops[part] / 1e9 / spent[part, KINDS[0]], 1) for part in PARTS if flops[part]
        },
        "gflops_per_second_of_the_step": round(flops.total() / 1e9 / seconds, 1),
    }
    if arguments.plot:
        plot(result, arguments.plot)
    report(result)


def trace(arguments: argparse.Namespace) -> tuple[dict[str, Operation], dict[str, list[float]], float]:
    """Operations by name, the seconds of each of their executions in one traced step, and the seconds of an untraced
    step."""
    import jax

    step = OwnStep(config_of(arguments))
    operations = read_program(step.program.train_step.lower(step.state, step.tokens).compile().as_text())
    seconds = timeit.repeat(step, number=1, repeat=5)
    events: dict[str, list[float]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step()
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        for plane in jax.profiler.ProfileData.from_file(path).planes:
            for line in plane.lines:
                for event in line.events:
                    if event.name in operations:
                        events[event.name].append(event.duration_ns / 1e9)
    return operations, events, float(np.median(seconds[1:]))


def read_program(text: str) -> dict[str, Operation]:
    """The instructions that are executed by themselves: those of the entry computation and of loop bodies."""
    bodies = Module(text).computations
    arrays = {one.name: one.arrays[:1] for body in bodies.values() for one in body}
    return {
        one.name: _operation(one, bodies, arrays)
        for body in bodies.values()
        for one in body
        if one.opcode not in ("while", "call", "conditional")
    }


def _operation(
    one: Instruction, bodies: dict[str, list[Instruction]], arrays: dict[str, tuple[HloArray, ...]]
) -> Operation:
    inner = [one]
    if one.opcode == "fusion" and (called := re.search(r"calls=%([\w.\-]+)", one.rest)):
        inner = bodies[called[1]]
    opcodes = {each.opcode for each in inner}
    flops = sum(_dot_flops(each, arrays) for each in inner if each.opcode == "dot")
    if flops:
        kind = KINDS[0]
    elif "reduce" in opcodes:
        kind = KINDS[2]
    elif opcodes <= {"copy", "transpose", "slice", "bitcast", "parameter", "concatenate", "broadcast", "constant",
                     "dynamic-slice", "dynamic-update-slice", "pad", "reshape", "iota"}:  # fmt: skip
        kind = KINDS[3]
    else:
        kind = KINDS[1]
    return Operation(_part(one.op_name), kind, flops)


def _part(path: str) -> str:
    if "jvp" not in path:
        return PARTS[4]
    if "logits" in path or "while/body" in path:
        return PARTS[0]
    if "blocks" in path:
        return PARTS[1] if re.search(r"attention/(?![qkvo]/)", path) else PARTS[2]
    return PARTS[3]


def _dot_flops(dot: Instruction, arrays: dict[str, tuple[HloArray, ...]]) -> int:
    left = re.match(r"%([\w.\-]+)", dot.rest)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.rest)
    if left is None or contracted is None or left[1] not in arrays:
        return 0
    ((_, sizes),) = arrays[left[1]]
    return 2 * dot.arrays[0].size * math.prod(sizes[int(d)] for d in contracted[1].split(",") if d)


def plot(result: dict[str, Any], path: str) -> None:
    """Draw one bar per part, colored by kind. Its length is the share of the thread seconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    left = np.zeros(len(PARTS))
    for kind, color in zip(KINDS, COLORS, strict=True):
        widths = np.array([100 * result["shares"][part][kind] for part in PARTS])
        axes.barh(PARTS, widths, left=left, label=kind, color=color)
        left += widths
    axes.invert_yaxis()
    axes.set_xlabel(f"% of thread time; the step takes {result['step_seconds']} s")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    say(f"plot: {path}")


if __name__ == "__main__":
    main()
