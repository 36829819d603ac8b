"""Compile a training step with sequences of 131,072 tokens for a slice that is not attached, and write what chapter 6
of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/06_slice.py

It writes 06_slice.json: the result of preflight.py and the longest operations of the program. This takes some minutes
of CPU time.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
COMMAND = (
    "preflight.py --config configs/llama_8B.json --tpu v5p-128 --set model.seq=131072 --set data.per_replica_batch=1"
    " --set compute.remat=save_attn --set mesh.cp=16 --set mesh.fsdp=4 --set mesh.tp=1"
    " --set mesh.shard_activations=false --set mesh.context_mode=zigzag"
)
OPERATIONS = 60
COLUMNS = "part", "seconds", "runs", "flops", "opcode", "result", "source"


def main() -> None:
    """Compile the program and keep its figures."""
    with tempfile.TemporaryDirectory() as tables:
        command = [sys.executable, *COMMAND.split(), "--json", "--op-table", tables]
        line = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        program = json.loads(line)
        with Path(program.pop("op_table")).open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))[:OPERATIONS]
    operations = [{column: row[column] for column in COLUMNS} for row in rows]
    result = {"command": f"python {COMMAND}", "program": program, "operations": operations}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
