"""Print what a training step runs between start and end of the collectives in its loops over the layers.

The step is compiled for a TPU slice that is not attached: python scripts/overlap_table.py CONFIG SLICE [NAME=VALUE ...]
"""

import sys
from collections import defaultdict

import jax

from mesh_transformer.config import load_config
from mesh_transformer.estimate import overlap
from mesh_transformer.estimate.hlo import overlaps
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import LAYER_LOOP
from mesh_transformer.train.step import TrainProgram, compile_step

# smaller arrays are sums of vectors
LEAST_BYTES = 1 << 20


def table(hlo: str) -> str:
    """A line for each kind and size of collective in each loop over the layers."""
    rows = defaultdict(list)
    for one in overlaps(hlo):
        loop = next((name for name in one.collective.loops if LAYER_LOOP in name), None)
        if loop is not None and one.collective.nbytes >= LEAST_BYTES:
            direction = "backward" if "transpose(" in loop else "forward"
            rows[direction, one.collective.kind, one.collective.nbytes].append((one.products, one.cycles))
    lines = ["loop      collective          MiB  number  products between start and end, and their kcycles"]
    for (direction, kind, nbytes), found in rows.items():
        between = "  ".join(f"{products}/{cycles / 1e3:.0f}" for products, cycles in found)
        lines.append(f"{direction:9} {kind:18} {nbytes / 2**20:4.0f}  {len(found):6}  {between}")
    return "\n".join(lines)


def main() -> None:
    """Compile and print."""
    path, slice_name, *overrides = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    config, target = load_config(path, overrides), tpu_target(slice_name)
    if config.mesh.pp > 1:
        sys.exit("mesh.pp: the loops of a pipeline are forward and backward in one tick: set mesh.pp=1")
    batch = config.microbatch(config.check_devices(target.n_devices))
    config = overlap.resolve(config, target.n_devices, target.accelerator)
    program = TrainProgram(Placement.of(config, target.devices()), config)
    sys.stdout.write(table(compile_step(program, config.optimizer.gradient_accumulation_steps, batch).as_text()) + "\n")


if __name__ == "__main__":
    main()
