"""Compile GPT-J-6B with FSDP for a slice that is not attached, and write what chapter 4 of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/04_fsdp.py

It writes 04_fsdp.json, the result of preflight.py, and 04_fsdp.tsv, the longest operations of the program. This takes
some minutes of CPU time.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parents[2]
COMMAND = (
    "preflight.py --config configs/6B_finetune_v3-8.json --tpu v5e-16 --set mesh.tp=1 --set mesh.fsdp=16"
    " --set data.per_replica_batch=2 --set optimizer.gradient_accumulation_steps=1 --set compute.remat=save_attn"
)
OPERATIONS = 60


def main() -> None:
    """Compile the program and keep its figures."""
    with tempfile.TemporaryDirectory() as tables:
        command = [sys.executable, *COMMAND.split(), "--json", "--op-table", tables]
        line = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        program = json.loads(line)
        table = Path(program.pop("op_table")).read_text(encoding="utf-8")
    result = {"command": f"python {COMMAND}", "program": program}
    (RESULTS / "04_fsdp.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    rows = list(csv.reader(table.splitlines(), delimiter="\t"))[: 1 + OPERATIONS]
    with (RESULTS / "04_fsdp.tsv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
