"""What a driver costs: a job of several workers with a driver that streams its data, beside the same job without a driver.

    python benchmarks/driver_overhead.py [--workers 4] [--ray-address A] [--rounds 3]

Without --ray-address the workers are processes of this machine, and batches go to them through pipes; with it, they go through
Ray's object store to the hosts of that cluster, whose workers must have as many devices as XLA_FLAGS gives here. The step is made to take about a second on two cores. Results are JSON on
standard output; the last line holds the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import REPO, emit, machine, say

STEPS, SKIPPED = 14, 4  # the first steps compile and fill buffers
TARGET = 0.05


def main() -> None:
    """Measure in turn, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--ray-address", help="a cluster with that many numbered hosts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step (default %(default)s)")
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        _write(Path(folder), arguments.tokens)
        for number in range(arguments.rounds):
            seconds["without"].append(_without(Path(folder), arguments.workers, f"plain{number}"))
            seconds["with"].append(_with(Path(folder), arguments, f"driven{number}"))
            say(f"round {number + 1}: {json.dumps({name: values[-1] for name, values in seconds.items()})}")
    plain, driven = (statistics.median(values) for values in seconds.values())
    overhead = driven - plain
    result = {
        "workers": arguments.workers,
        "transport": "ray" if arguments.ray_address else "processes",
        "step_s_without_driver": round(plain, 4),
        "step_s_with_driver": round(driven, 4),
        "rounds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
        "overhead_s": round(overhead, 4),
        "share_of_a_1_s_step": round(overhead, 4),
        "below_target": overhead < TARGET,
        "machine": machine(),
    }
    emit(result)


def _write(folder: Path, tokens: int) -> None:
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer, {i * i}.\n" for i in range(40_000)))
    config: dict[str, Any] = {
        "model": {"layers": 2, "d_model": 256, "n_heads": 4, "n_vocab": 257, "seq": 256},
        "optimizer": {"total_steps": STEPS, "anneal_steps": STEPS, "warmup_steps": 1},
        "data": {"train_set": "text.txt", "tokenizer": "bytes", "batch_size": tokens // 256, "val_set": {}},
        "checkpoint": {"ckpt_every": 1000},
        "logging": {"tensorboard": False},
    }
    (folder / "config.json").write_text(json.dumps(config))


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_force_host_platform_device_count=1"),
        "TMPDIR": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def _command(program: str, run: str, *more: str) -> list[str]:
    place = ["--set", f"checkpoint.model_dir={run}"]
    return [sys.executable, str(REPO / program), "--config", "config.json", *place, *more]


def _without(folder: Path, workers: int, run: str) -> float:
    """Each process reads its own share."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(workers)}
    processes = [
        subprocess.Popen(
            _command("device_train.py", run),
            cwd=folder,
            env={**_environment(folder), **shared, "JAX_PROCESS_ID": str(i)},
            stderr=subprocess.DEVNULL,
        )
        for i in range(workers)
    ]
    if any(process.wait() for process in processes):
        raise RuntimeError("a process of the job without a driver failed")
    return _step_s(folder / run)


def _with(folder: Path, arguments: argparse.Namespace, run: str) -> float:
    place = ["--processes", str(arguments.workers)]
    if arguments.ray_address:
        place = ["--ray-address", arguments.ray_address]
    command = _command("train.py", run, *place, "--set", "data.read_by=driver")
    subprocess.run(command, cwd=folder, env=_environment(folder), stderr=subprocess.DEVNULL, check=True)
    return _step_s(folder / run)


def _step_s(run: Path) -> float:
    """Seconds of a step, median of those that count."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config_tokens = json.loads((run.parent / "config.json").read_text())["data"]["batch_size"] * 256
    return statistics.median(config_tokens / record["train/tokens_per_sec"] for record in records[SKIPPED:-1])


if __name__ == "__main__":
    main()
