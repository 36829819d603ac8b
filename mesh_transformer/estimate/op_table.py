"""The table of a compiled program's operations: where they come from, what they compute and move, and their estimated
time."""

import csv
from collections.abc import Mapping
from pathlib import Path

from mesh_transformer.accelerators import Accelerator
from mesh_transformer.estimate.timeline import Timeline

COLUMNS = ("part", "seconds", "share", "runs", "flops", "bytes", "opcode", "result", "source", "name")
"""part: of timeline.PARTS. seconds, share: estimated, of all runs; empty if the accelerator is not in the table. runs:
in one step. flops, bytes: of one run. result: type on one device. source: the place in the traced function."""
# Without an accelerator, an operation's weight is the bytes that it moves.
_UNKNOWN = Accelerator("unknown", "", peak_tflops=1e-3, memory_gb_s=1.0, usable_gib=0.0, link_gb_s=1.0)


def write_op_table(
    path: Path, hlo: str, accelerator: Accelerator | None, loops: Mapping[str, int], slices: int = 1
) -> None:
    """Write the table as tab-separated values, the longest operation first.

    Args:
        hlo: the optimized text of the program.
        accelerator: of its devices; None: it is not in the table of accelerators.
        loops, slices: as of `Timeline`.
    """
    timeline = Timeline(hlo, accelerator or _UNKNOWN, loops, slices)
    estimate = timeline.estimate()
    with path.open("w", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        table.writerow(COLUMNS)
        for name, spent in sorted(estimate.spent.items(), key=lambda item: -item[1].seconds):
            instruction = timeline.module.instructions[name]
            times = (f"{spent.seconds:.3g}", f"{spent.seconds / estimate.seconds:.4f}") if accelerator else ("", "")
            work = timeline.flops(instruction), timeline.module.moved_bytes(instruction)
            origin = instruction.opcode, instruction.result, instruction.op_name
            table.writerow((spent.part, *times, spent.runs, *work, *origin, name))
