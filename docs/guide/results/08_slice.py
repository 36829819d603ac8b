"""Compile a training step with experts for a v5e-16 in four ways, and write what chapter 8 reads.

    python docs/guide/results/08_slice.py

writes 08_slice.json. It needs libtpu (pip install -e '.[tpu]'), but no TPU, and takes some minutes of CPU time. It does
what the command of each entry does.
"""

import csv
import json
import sys
import tempfile
from pathlib import Path

import jax

from mesh_transformer.config import load_config
from mesh_transformer.estimate.prediction import predict_training
from mesh_transformer.estimate.programs import default_folder
from mesh_transformer.estimate.target import tpu_target

ROOT = Path(__file__).resolve().parents[3]
CONFIG, SLICE = "configs/moe_1B_A300M.json", "v5e-16"
# one sequence of 2,048 tokens on each device
STEP = ("mesh.dp=1", "data.per_replica_batch=1")
WAYS = {
    "weights travel": ("mesh.fsdp=16",),
    "tokens travel": ("mesh.fsdp=1", "mesh.ep=16", "experts.capacity_factor=1.25"),
    "tokens, dropless": ("mesh.fsdp=1", "mesh.ep=16"),
    "both": ("mesh.fsdp=4", "mesh.ep=4", "experts.capacity_factor=1.25"),
}
# operations of a table that are kept, beside its collectives
LONGEST = 16


def main() -> None:
    """Compile, read and write."""
    jax.config.update("jax_platforms", "cpu")
    target, found = tpu_target(SLICE), {}
    for way, settings in WAYS.items():
        overrides = [*STEP, *settings]
        options = " ".join(f"--set {setting}" for setting in overrides)
        entry = {"command": f"python preflight.py --config {CONFIG} --tpu {SLICE} {options}"}
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder, "table.tsv")
            config = load_config(str(ROOT / CONFIG), overrides)
            row = predict_training(config, target, overrides, default_folder(), op_table=lambda _, path=table: path)
            with table.open(newline="") as file:
                operations = list(csv.DictReader(file, delimiter="\t"))
        sys.stderr.write(f"{way}: {row.step_s} s, {row.peak_gib} GiB, {row.reason}\n")
        found[way] = entry | {
            "step_s": row.step_s,
            "peak_gib": row.peak_gib,
            "usable_gib": row.usable_gib,
            "parts": row.parts,
            "operations": [one for n, one in enumerate(operations) if n < LONGEST or one["part"] == "collectives"],
        }
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
