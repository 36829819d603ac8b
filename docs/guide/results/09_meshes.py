"""Compile JAXformer's model on two meshes of a v4-64 that is not attached, and write what chapter 9 reads.

    pip install -e '.[tpu]'
    python docs/guide/results/09_meshes.py         # both programs
    python docs/guide/results/09_meshes.py NAME    # one of them; the other stays in the file

It writes 09_meshes.json: for each program the result of preflight.py and its longest operations. A program takes
minutes of CPU time.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
ROOT = RESULTS.parents[2]
COMMAND = "preflight.py --config configs/jaxformer_949M.json --tpu v4-64"
# both have 256 sequences of a step
PROGRAMS = {
    "pp 2 x fsdp 8 x tp 2, 8 microbatches": "",
    "fsdp 32, 1 microbatch": "mesh.fsdp=32 mesh.tp=1 mesh.pp=1 data.batch_size=256"
    " optimizer.gradient_accumulation_steps=1",
}
OPERATIONS = 60


def compiled(changes: str) -> dict[str, object]:
    """The result of preflight for the config with these changes, and the first rows of its table of operations."""
    command = [*COMMAND.split(), *(word for change in changes.split() for word in ("--set", change))]
    with tempfile.TemporaryDirectory() as tables:
        run = [sys.executable, *command, "--json", "--op-table", tables]
        line = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        program = json.loads(line)
        table = Path(program.pop("op_table")).read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines(), delimiter="\t"))
    kept = [{name: one[name] for name in ("part", "seconds", "runs", "opcode", "result", "source")} for one in rows]
    return {"command": f"python {' '.join(command)}", "program": program, "operations": kept[:OPERATIONS]}


def main() -> None:
    """Compile the programs and keep their figures."""
    file = RESULTS / "09_meshes.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in sys.argv[1:] or PROGRAMS:
        found[name] = compiled(PROGRAMS[name])
        # in the order of the table above
        found = {one: found[one] for one in PROGRAMS if one in found}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
