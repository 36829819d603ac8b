"""Compile time of the train step for few and many layers, and what the second start of a run compiles.

    python benchmarks/compile_time.py

Without the compile cache, each compilation in a process of its own, in turn. Then `device_train.py` twice, with a
cache folder that is empty at first.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time

from common import REPO, emit, in_turn, machine, median, say, this_script

LAYERS = (2, 24)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(REPO / "configs/125M.json"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layers:
        emit(compile_once(arguments.config, arguments.layers))
        return
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    commands = {
        str(n): this_script(__file__, "--layers", str(n), "--config", arguments.config) for n in LAYERS
    }
    runs = in_turn(commands, arguments.rounds)
    seconds = {name: median([run["seconds"] for run in records]) for name, records in runs.items()}
    del os.environ["JAX_ENABLE_COMPILATION_CACHE"]
    emit(
        {
            "benchmark": "compile_time",
            "config": arguments.config,
            "seconds": seconds,
            "ratio": round(seconds[str(LAYERS[1])] / seconds[str(LAYERS[0])], 3),
            "starts": starts(),
            "machine": machine(),
        }
    )


def compile_once(config_path: str, layers: int) -> dict[str, float]:
    """Trace, lower and compile the step; nothing is allocated."""
    from mesh_transformer.config import load_config
    from mesh_transformer.runtime.session import Session
    from mesh_transformer.train.step import TrainProgram, compile_step

    config = load_config(config_path, [f"model.layers={layers}"])
    session = Session.open(config)
    began = time.perf_counter()
    program = TrainProgram(session.placement, config)
    compile_step(program, config.optimizer.gradient_accumulation_steps, session.microbatch)
    return {"seconds": round(time.perf_counter() - began, 2)}


def starts() -> list[dict[str, float]]:
    """Two starts of the same training command: programs compiled, programs read, seconds of the whole process."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            command = [
                sys.executable, "device_train.py", "--config", "configs/tiny_shakespeare.json",
                "--set", "optimizer.total_steps=2", "--set", f"checkpoint.model_dir={folder}/run{number}",
            ]  # fmt: skip
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}
            began = time.perf_counter()
            child = subprocess.run(
                command, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True, check=True
            )
            match = re.search(r"(\d+) programs compiled, (\d+) read", child.stderr)
            if match is None:
                raise RuntimeError(child.stderr)
            seconds = round(time.perf_counter() - began, 1)
            results.append({"compiled": int(match[1]), "read": int(match[2]), "seconds": seconds})
            say(f"start {number}: {results[-1]}")
    return results


if __name__ == "__main__":
    main()
