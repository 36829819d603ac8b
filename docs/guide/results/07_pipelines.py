"""Compile GPT-J-6B in four stages for a slice that is not attached, and write what chapter 7 of the guide reads.

    pip install -e '.[tpu]'
    python docs/guide/results/07_pipelines.py

It writes 07_pipelines.json, the result of preflight.py, and 07_pipelines.tsv, the longest operations of the program.
This takes some minutes of CPU time.
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
    "preflight.py --config configs/6B_finetune_v3-8.json --tpu v4-16 --set mesh.pp=4 --set mesh.tp=2"
    " --set mesh.shard_activations=true --set optimizer.gradient_accumulation_steps=16"
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
    (RESULTS / "07_pipelines.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    rows = list(csv.reader(table.splitlines(), delimiter="\t"))[: 1 + OPERATIONS]
    with (RESULTS / "07_pipelines.tsv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
