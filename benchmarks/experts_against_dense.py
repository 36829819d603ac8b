"""A model with experts beside a dense one with as many active parameters, on tiny Shakespeare: the same tokens, steps
and learning rates. Both train on fsdp 2 x pp 2 x tp 2, which are eight virtual CPU devices.

python benchmarks/experts_against_dense.py [--seeds N] [--steps N] [--pictures FOLDER]
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import REPO, command, parser, report

CONFIG = "configs/moe_tiny_shakespeare.json"
# one expert, which all tokens go through: as wide as the experts that a token chooses in the config
DENSE = ["model.n_experts=1", "model.experts_per_token=1", "model.expert_d_ff=256"]
MODELS = {"experts": (CONFIG, []), "dense": (CONFIG, DENSE)}
PICTURES = "experts.png", "loss.png"


def train(config: str, changes: list[str], folder: str) -> list[dict[str, float]]:
    """The metrics of a run, by step."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run(
        command("device_train.py", config, [*changes, f"checkpoint.model_dir={folder}"]),
        cwd=REPO,
        check=True,
        env=environment,
    )
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def compare(description: str | None, models: Mapping[str, tuple[str, list[str]]], seeds: int) -> dict[str, Any]:
    """Train two models, each a config and changes, with every seed. The figures of both, and the ratio of the mean
    validation losses, first over second; the pictures of the first model."""
    made = parser(description, config=None, rounds=None)
    made.add_argument("--seeds", type=int, default=seeds, help="runs of each model")
    made.add_argument("--steps", type=int, help="steps of each run (default: the steps of the config)")
    made.add_argument(
        "--pictures", metavar="FOLDER", help="copy the pictures of the first run of the first model there"
    )
    arguments = made.parse_args()
    steps = [f"optimizer.total_steps={arguments.steps}"] if arguments.steps else []
    losses: dict[str, list[float]] = {name: [] for name in models}
    loads: dict[str, list[float]] = {name: [] for name in models}
    first, second = models
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(arguments.seeds):
            for name, (config, changes) in models.items():
                run = f"{folder}/{name}_{seed}"
                records = train(config, [*changes, *steps, f"model.seed={seed}", f"data.seed={seed}"], run)
                losses[name].append(round(next(r[k] for r in records[::-1] for k in r if k.startswith("val/loss")), 4))
                last = [r["experts/largest_load"] for r in records[-50:]]
                loads[name].append(round(statistics.mean(last), 2))
                if arguments.pictures and seed == 0 and name == first:
                    for picture in PICTURES:
                        shutil.copy(f"{run}/{picture}", arguments.pictures)
    means = {name: round(statistics.mean(values), 4) for name, values in losses.items()}
    return {
        "val_loss_nats_per_character": losses,
        "mean": means,
        f"{first}_over_{second}": round(means[first] / means[second], 4),
        "largest_load_over_mean_last_50_steps": loads,
        # of all runs, with starts and compilation
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }


if __name__ == "__main__":
    report(compare(__doc__, MODELS, seeds=3))
