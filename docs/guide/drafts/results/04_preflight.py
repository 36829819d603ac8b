"""Compile the step of chapter 4 for a slice that is not attached: writes 04_preflight.json and 04_op_table.tsv beside
this file.

    python docs/guide/results/04_preflight.py

It needs libtpu (`pip install -e '.[tpu]'`) and some minutes of CPU time.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[3]
SETTINGS = {
    "mesh.tp": 1,
    "mesh.fsdp": 16,
    "data.per_replica_batch": 2,
    "optimizer.gradient_accumulation_steps": 1,
    "compute.remat": "save_attn",
}


def main() -> None:
    """Run preflight, and keep its line of JSON and its table."""
    with tempfile.TemporaryDirectory() as tables:
        command = [sys.executable, str(ROOT / "preflight.py"), "--config", str(ROOT / "configs/6B_finetune_v3-8.json")]
        command += ["--tpu", "v5e-16", "--json", "--op-table", tables]
        for name, value in SETTINGS.items():
            command += ["--set", f"{name}={value}"]
        found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        HERE.with_suffix(".json").write_text(found.stdout, encoding="utf-8")
        shutil.copy(Path(tables) / "v5e-16-train-1.tsv", HERE.with_name("04_op_table.tsv"))


if __name__ == "__main__":
    main()
