"""Compiles the training step of a config for TPU slices, without a TPU, and reports memory and collectives.

This needs jax[tpu], in an environment of its own (pip install -e '.[tpu]'), and about a minute per program. The output
is one JSON object per line on standard output, and a table on standard error.
"""

import re
import time
from collections import defaultdict
from typing import Any

import jax
from common import emit, parser, say
from support.hlo import Collective, collectives

from mesh_transformer import platforms, slices
from mesh_transformer.config import Config, load_config
from mesh_transformer.errors import UserError
from mesh_transformer.models.model import LAYER_LOOP, Placement
from mesh_transformer.runtime import cli
from mesh_transformer.train.step import TrainProgram, compile_step, peak_bytes

GIB = 2**30


def main() -> int:
    """Parse the arguments, compile, report. Exit code 1 if a program does not fit."""
    made = parser(__doc__, config="6B_finetune_v3-8", rounds=None)
    made.add_argument(
        "--accumulation",
        default="16,1",
        metavar="A,...",
        help="numbers of microbatches per step (default: %(default)s)",
    )
    made.add_argument(
        "--topology",
        default=",".join(platforms.USABLE_GIB),
        metavar="SLICE,...",
        help="types of TPU slices (default: %(default)s)",
    )
    arguments = made.parse_args()
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", arguments.accumulation):
        raise UserError(f"--accumulation {arguments.accumulation}: expected whole numbers, 1 or more")
    counts = [int(count) for count in arguments.accumulation.split(",")]
    # the devices of this machine are not used
    jax.config.update("jax_platforms", "cpu")
    fits = True
    for name in arguments.topology.split(","):
        for accumulation in counts:
            report = measure(arguments.config, arguments.overrides, name, accumulation)
            fits &= report["fits"]
            emit(report)
            say(_table(report))
    return 0 if fits else 1


def measure(path: str, overrides: list[str], slice_name: str, accumulation: int) -> dict[str, Any]:
    """Compile the step of a config for a slice. Sizes are bytes per device; figures in GiB are rounded."""
    if slice_name not in platforms.USABLE_GIB:
        known = ", ".join(platforms.USABLE_GIB)
        raise UserError(f"--topology {slice_name}: the usable memory is known only for {known}")
    devices = platforms.slice_devices(slice_name)
    config = _for_devices(path, overrides, len(devices))
    shape = config.check_devices(len(devices))
    batch = config.microbatch(shape)
    program = TrainProgram(Placement.of(config, devices), config)
    usable_gib = platforms.USABLE_GIB[slice_name]
    report: dict[str, Any] = {
        "slice": slice_name,
        "mesh": shape,
        "accumulation": accumulation,
        "microbatch": batch,
        "memory_gib": slices.parse(slice_name).memory_gib_per_device,
        "usable_gib": usable_gib,
    }
    start = time.monotonic()
    try:
        compiled = compile_step(program, accumulation, batch)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return report | {"fits": False, "refused": str(error)}
    memory = compiled.memory_analysis()
    peak = peak_bytes(compiled)
    return report | {
        "fits": peak <= usable_gib * GIB,
        "peak_gib": round(peak / GIB, 2),
        "peak": peak,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries_alive": memory.peak_memory_in_bytes - memory.argument_size_in_bytes,
        "temp_size_in_bytes": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "compile_seconds": round(time.monotonic() - start, 1),
        "collectives": _count(collectives(compiled.as_text())),
    }


def _for_devices(path: str, overrides: list[str], n_devices: int) -> Config:
    """The config, with less tensor parallelism if the slice has too few devices, such as the four of a v4-8."""
    config = load_config(path, overrides)
    if config.mesh.fsdp * config.mesh.tp <= n_devices:
        return config
    return load_config(path, [*overrides, f"mesh.tp={max(n_devices // config.mesh.fsdp, 1)}"])


def _count(found: list[Collective]) -> list[dict[str, Any]]:
    """Collectives by place and kind. Bytes are those of one iteration of the innermost loop."""
    nbytes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in found:
        nbytes[_place(one.loops), one.kind].append(one.nbytes)
    return [
        {"where": where, "kind": kind, "count": len(sizes), "bytes": sum(sizes)}
        for (where, kind), sizes in sorted(nbytes.items())
    ]


def _place(loops: tuple[str, ...]) -> str:
    if not loops:
        return "once"
    if LAYER_LOOP in loops[-1]:
        return "layer backward" if "transpose(" in loops[-1] else "layer forward"
    return "microbatch"


def _table(report: dict[str, Any]) -> str:
    head = f"{report['slice']:6} {report['accumulation']:3} microbatches: "
    if "refused" in report:
        return f"{head}does not fit: {report['refused']}"
    keys = {"arguments": "arguments", "temporaries": "temporaries_alive", "code": "code"}
    sizes = ", ".join(f"{name} {report[key] / GIB:.2f}" for name, key in keys.items())
    lines = [
        f"{head}peak {report['peak_gib']:.2f} GiB of {report['usable_gib']} ({sizes}); "
        f"{'fits' if report['fits'] else 'does not fit'}; compiled in {report['compile_seconds']:.0f} s"
    ]
    lines += [
        f"  {row['where']:15} {row['count']:3} {row['kind']:19} {row['bytes'] / 2**20:9.2f} MiB"
        for row in report["collectives"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    cli.run(main)
