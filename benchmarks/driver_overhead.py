"""Overhead of a driver: a job of several workers with a driver that streams the data, compared with a job without a
driver.

    python benchmarks/driver_overhead.py [--workers 4] [--ray-address A] [--rounds 3]

Without --ray-address the workers are processes of this machine, and batches reach them through pipes. With it, batches
reach the hosts of that cluster through Ray's object store; each worker must have as many devices as XLA_FLAGS sets
here. A step takes about a second on two cores. The results are JSON on standard output; the last line holds the
medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

# adds the helpers of tests/ to the path
import common
from support.commands import finish, free_port, metrics, start

# the first steps compile and fill buffers
STEPS, SKIPPED = 14, 4
TARGET = 0.05
SEQ = 256
# time limit of a run
RUN_S = 1800.0


def main() -> None:
    """Measure in turn, and print the result."""
    made = common.parser(__doc__, config=None, rounds=3)
    made.add_argument("--workers", type=int, default=4)
    made.add_argument("--ray-address", help="a Ray cluster with as many numbered hosts as there are workers")
    made.add_argument("--tokens", type=int, default=8192, help="tokens per step (default: %(default)s)")
    arguments = made.parse_args()
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write(folder, arguments.tokens)
        for number in range(arguments.rounds):
            seconds["without"].append(_without(folder, arguments, f"plain{number}"))
            seconds["with"].append(_with(folder, arguments, f"driven{number}"))
            common.say(f"round {number + 1}: {json.dumps({name: values[-1] for name, values in seconds.items()})}")
    plain, driven = (statistics.median(values) for values in seconds.values())
    overhead = driven - plain
    common.report(
        {
            "workers": arguments.workers,
            "transport": "ray" if arguments.ray_address else "processes",
            "step_s_without_driver": round(plain, 4),
            "step_s_with_driver": round(driven, 4),
            "rounds": {name: [round(value, 4) for value in values] for name, values in seconds.items()},
            "overhead_s": round(overhead, 4),
            "below_target": overhead < TARGET,
        }
    )


def _write(folder: Path, tokens: int) -> None:
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer, {i * i}.\n" for i in range(40_000)))
    config = {
        "model": {"layers": 2, "d_model": 256, "n_heads": 4, "n_vocab": 257, "seq": SEQ},
        "optimizer": {"total_steps": STEPS, "anneal_steps": STEPS, "warmup_steps": 1},
        "data": {"train_set": "text.txt", "tokenizer": "bytes", "batch_size": tokens // SEQ, "val_set": {}},
        "checkpoint": {"ckpt_every": 1000},
        "logging": {"tensorboard": False},
    }
    (folder / "config.json").write_text(json.dumps(config))


def _start(program: str, folder: Path, run: str, *more: str, **environment: str) -> subprocess.Popen[str]:
    flags = os.environ.get("XLA_FLAGS", "--xla_force_host_platform_device_count=1")
    given = ("--config", "config.json", "--set", f"checkpoint.model_dir={run}", *more)
    return start(program, *given, cwd=folder, TMPDIR=str(folder), XLA_FLAGS=flags, **environment)


def _without(folder: Path, arguments: argparse.Namespace, run: str) -> float:
    """The seconds of a step without a driver: each process reads its own share of the data."""
    job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(arguments.workers)}
    numbers = range(arguments.workers)
    processes = [_start("device_train.py", folder, run, **job, JAX_PROCESS_ID=str(i)) for i in numbers]
    for process in processes:
        finish(process, timeout_s=RUN_S)
    return _step_s(folder / run, arguments.tokens)


def _with(folder: Path, arguments: argparse.Namespace, run: str) -> float:
    place = ["--processes", str(arguments.workers)]
    if arguments.ray_address:
        place = ["--ray-address", arguments.ray_address]
    driver = _start("train.py", folder, run, *place, "--set", "data.read_by=driver")
    finish(driver, timeout_s=RUN_S)
    return _step_s(folder / run, arguments.tokens)


def _step_s(run: Path, tokens: int) -> float:
    """Median seconds of a step of `tokens` tokens, without the first and the last steps."""
    records = metrics(run)[SKIPPED:-1]
    return statistics.median(tokens // SEQ * SEQ / record["train/tokens_per_sec"] for record in records)


if __name__ == "__main__":
    main()
