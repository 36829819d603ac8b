"""Print what a training step sends between TPU slices: once, and in its loops.

The step is compiled for slices that are not attached: python scripts/slices_table.py CONFIG SLICES [NAME=VALUE ...],
such as 2xv5e-16 mesh.dcn=dp. preflight.py reads the same compiled program.
"""

import sys
from collections import Counter, defaultdict

import jax

from mesh_transformer.config import load_config
from mesh_transformer.estimate import overlap
from mesh_transformer.estimate.hlo import Module
from mesh_transformer.estimate.programs import compile_for, default_folder
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.models.placement import Placement
from mesh_transformer.train.step import TrainProgram, lower_step


def table(hlo: str) -> str:
    """A line for each kind and dtype of transfer: how often a device makes it in a step, and the bytes that it yields
    in all. A loop whose number of turns the text does not tell counts once."""
    module = Module(hlo)
    number: Counter[tuple[str, str, str]] = Counter()
    nbytes: Counter[tuple[str, str, str]] = Counter()
    for (computation, loops), times in _runs(module).items():
        for one in module.computations[computation]:
            if one.opcode == "recv" and one.crossing is not None:
                array = one.arrays[0]
                key = "in loops" if loops else "once", one.crossing.kind, array.dtype
                number[key] += times
                nbytes[key] += times * array.nbytes
    lines = ["where     transfer            dtype  number      MiB"]
    for key in sorted(number):
        where, kind, dtype = key
        lines.append(f"{where:9} {kind:18}  {dtype:5}  {number[key]:6}  {nbytes[key] / 2**20:7.2f}")
    return "\n".join(lines)


def _runs(module: Module) -> dict[tuple[str, int], int]:
    """How often each computation runs, by its name and the number of loops around it."""
    found: dict[tuple[str, int], int] = defaultdict(int)

    def run(computation: str, loops: int, times: int) -> None:
        found[computation, loops] += times
        for one in module.computations.get(computation, ()):
            turns = (module.trips(one) or 1) if one.opcode == "while" else 1
            if one.opcode in ("while", "call", "conditional"):
                for name in one.called:
                    run(name, loops + (turns > 1), times * turns)

    run(module.entry, 0, 1)
    return found


def main() -> None:
    """Compile and print."""
    path, slices, *overrides = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    config, target = load_config(path, overrides), tpu_target(slices)
    batch = config.microbatch(config.check_devices(target.n_devices))
    config = overlap.resolve(config, target.n_devices, target.accelerator)
    program = TrainProgram(Placement.of(config, target.devices()), config)
    lowered = lower_step(program, config.optimizer.gradient_accumulation_steps, batch)
    compiled = compile_for(lowered, target, default_folder())
    sys.stdout.write(f"{compiled.refused or table(compiled.hlo)}\n")


if __name__ == "__main__":
    main()
