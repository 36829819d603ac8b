"""Validation loss and training time of configs/tiny_shakespeare.json, trained with the command in the README.

python benchmarks/tiny_shakespeare.py [--plot loss.png]
"""

import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from common import REPO, command, parser, report


def main() -> None:
    made = parser(__doc__, config=None, rounds=None)
    made.add_argument("--plot", metavar="PNG", help="copy the loss curve of the run to this file")
    arguments = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"checkpoint.model_dir={folder}/run"]
        train = command("device_train.py", "configs/tiny_shakespeare.json", changes)
        began = time.perf_counter()
        subprocess.run(train, cwd=REPO, check=True)
        seconds = time.perf_counter() - began
        records = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        if arguments.plot:
            shutil.copy(f"{folder}/run/loss.png", arguments.plot)
    losses = {r["step"]: round(r["val/loss_shakespeare"], 4) for r in records if "val/loss_shakespeare" in r}
    report(
        {
            "val_loss_nats_per_character": losses[max(losses)],
            # of the whole process, with start and compilation
            "minutes": round(seconds / 60, 2),
            "steps": max(losses),
            "val_losses": losses,
        }
    )


if __name__ == "__main__":
    main()
