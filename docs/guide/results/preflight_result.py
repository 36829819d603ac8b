"""What chapters of the guide keep of a program that preflight.py compiles.

The scripts of this folder use it. It needs libtpu, but no TPU: pip install -e '.[tpu]'. A program takes minutes of CPU
time.
"""

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
OPERATIONS = 60
COLUMNS = ("part", "seconds", "runs", "opcode", "result", "source")


def compiled(command: str, columns: Sequence[str] = COLUMNS) -> dict[str, Any]:
    """The result of a preflight command, and the longest operations of its one program with these columns."""
    with tempfile.TemporaryDirectory() as tables:
        run = [sys.executable, *command.split(), "--json", "--op-table", tables]
        line = subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
        program = json.loads(line)
        table = Path(program.pop("op_table")).read_text(encoding="utf-8")
    rows = list(csv.DictReader(table.splitlines(), delimiter="\t"))[:OPERATIONS]
    operations = [{name: row[name] for name in columns} for row in rows]
    return {"command": f"python {command}", "program": program, "operations": operations}


def write(script: str, found: dict[str, Any]) -> None:
    """Write what a script found beside it, as JSON."""
    Path(script).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
