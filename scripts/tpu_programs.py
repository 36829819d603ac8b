"""Write tests/estimate/programs/*.hlo.gz: training steps of GPT-J-6B as libtpu compiles them, without what no test
reads.

It needs jax[tpu], but no TPU. Run it after a change of the training step or of libtpu that changes their time, and
update the expected figures in tests/estimate/test_recorded.py.
"""

import gzip
import re
from pathlib import Path

import jax

from mesh_transformer.config import load_config
from mesh_transformer.estimate.hlo import Module
from mesh_transformer.estimate.target import tpu_target
from mesh_transformer.models.placement import Placement
from mesh_transformer.train.step import TrainProgram, compile_step

ROOT = Path(__file__).resolve().parents[1]
# the slices, and the devices that share a replica
SLICES = {"v3-8": 8, "v4-8": 4, "v5e-8": 8}
ACCUMULATION = 16


def main() -> None:
    """Compile and write the programs."""
    jax.config.update("jax_platforms", "cpu")
    for name, tp in SLICES.items():
        config = load_config(str(ROOT / "configs/6B_finetune_v3-8.json"), [f"mesh.tp={tp}"])
        program = TrainProgram(Placement.of(config, tpu_target(name).devices()), config)
        text = stripped(compile_step(program, ACCUMULATION, 1).as_text())
        (ROOT / f"tests/estimate/programs/{name}.hlo.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def stripped(hlo: str) -> str:
    """The computations of a program without layouts, places in source files and settings of the compiler."""
    names = Module(hlo).computations
    lines, inside = [], False
    for line in hlo.splitlines():
        inside |= line.endswith("{") and any(name in line for name in names)
        cycles = re.search(r'"estimated_cycles":"\d+"', line)
        line = re.sub(r", backend_config=.*| stack_frame_id=\d+|\{[\d,]*:[^}]*\}|/\*index=\d+\*/", "", line)
        lines += [line + (f", backend_config={{{cycles[0]}}}" if cycles else "")] if inside else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
