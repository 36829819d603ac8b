"""The collectives of a config's training step on TPU slices, without a TPU: where they run, how many, how large.

This needs jax[tpu], in an environment of its own (pip install -e '.[tpu]'), and about a minute per slice. The output is
one JSON object per slice on standard output, and a table on standard error. preflight.py reports memory and time.
"""

from collections import defaultdict
from typing import Any

import jax
from common import emit, parser, say

from mesh_transformer.config import load_config
from mesh_transformer.estimate.hlo import Collective, collectives
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.models.placement import Placement
from mesh_transformer.models.stack import LAYER_LOOP
from mesh_transformer.runtime import cli
from mesh_transformer.train.step import TrainProgram, compile_step


def main() -> None:
    """Parse the arguments, compile, report."""
    made = parser(__doc__, config="6B_finetune_v3-8", rounds=None)
    made.add_argument(
        "--tpu", action="append", metavar="SLICE", help="type of a slice; may be repeated (default: v3-8)"
    )
    arguments = made.parse_args()
    # the devices of this machine are not used
    jax.config.update("jax_platforms", "cpu")
    config = load_config(arguments.config, arguments.overrides)
    for name in arguments.tpu or ["v3-8"]:
        target = tpu_target(name)
        shape = config.check_devices(target.n_devices)
        program = TrainProgram(Placement.of(config, target.devices()), config)
        accumulation = config.optimizer.gradient_accumulation_steps
        compiled = compile_step(program, accumulation, config.microbatch(shape))
        found = _count(collectives(compiled.as_text()))
        emit({"slice": name, "mesh": shape, "accumulation": accumulation, "collectives": found})
        for row in found:
            say(f"{name:8} {row['where']:15} {row['count']:3} {row['kind']:19} {row['bytes'] / 2**20:9.2f} MiB")


def _count(found: list[Collective]) -> list[dict[str, Any]]:
    """Collectives by place and kind. Bytes are of one iteration of the innermost loop."""
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


if __name__ == "__main__":
    cli.run(main)
