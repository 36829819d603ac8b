"""Compile a training step with sequences of 131,072 tokens for a v5e-16, and write what chapter 6 reads.

    python docs/guide/results/06_slice.py

writes 06_slice.json. It needs libtpu (pip install -e '.[tpu]'), but no TPU, and takes minutes. It does what the command
of each entry does.
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
CONFIG, SLICE = "configs/125M.json", "v5e-16"
STEP = ("data.seq=131072", "data.per_replica_batch=1", "optimizer.gradient_accumulation_steps=1", "mesh.cp=16")
# operations of the table that are kept
ROWS = 8


def main() -> None:
    """Compile, read and write."""
    jax.config.update("jax_platforms", "cpu")
    target, found = tpu_target(SLICE), {}
    for mode in "zigzag", "ring", "ulysses":
        overrides = [*STEP, f"mesh.context_mode={mode}"]
        settings = " ".join(f"--set {setting}" for setting in overrides)
        entry = {"command": f"python preflight.py --config {CONFIG} --tpu {SLICE} {settings}"}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "table.tsv")
            config = load_config(str(ROOT / CONFIG), overrides)
            row = predict_training(config, target, overrides, default_folder(), op_table=lambda _, path=path: path)
            if path.exists():
                with path.open(newline="") as file:
                    entry["operations"] = list(csv.DictReader(file, delimiter="\t"))[:ROWS]
        entry |= {"reason": row.reason, "step_s": row.step_s, "peak_gib": row.peak_gib, "parts": row.parts}
        sys.stderr.write(f"{mode}: {row.step_s} s, {row.peak_gib} GiB, {row.reason}\n")
        found[mode] = entry
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
