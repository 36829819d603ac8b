"""Compile JAXformer's model on two meshes of a v4-64 that is not attached, and write what chapter 9 reads.

    pip install -e '.[tpu]'
    python docs/guide/results/09_meshes.py         # both programs
    python docs/guide/results/09_meshes.py NAME    # one of them; the other stays in the file

It writes 09_meshes.json: for each program the result of preflight.py and its longest operations. A program takes
minutes of CPU time.
"""

import json
import sys
from pathlib import Path

from preflight_result import compiled, write

COMMAND = "preflight.py --config configs/jaxformer_949M.json --tpu v4-64"
# both have 256 sequences of a step
PROGRAMS = {
    "pp 2 x fsdp 8 x tp 2, 8 microbatches": "",
    "fsdp 32, 1 microbatch": "mesh.fsdp=32 mesh.tp=1 mesh.pp=1 data.batch_size=256"
    " optimizer.gradient_accumulation_steps=1",
}


def main() -> None:
    """Compile the programs and keep their figures."""
    file = Path(__file__).with_suffix(".json")
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in sys.argv[1:] or PROGRAMS:
        found[name] = compiled(" ".join([COMMAND, *(f"--set {change}" for change in PROGRAMS[name].split())]))
        # in the order of the table above
        write(__file__, {one: found[one] for one in PROGRAMS if one in found})


if __name__ == "__main__":
    main()
