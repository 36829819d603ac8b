"""Compile time of the training step with few and with many layers, and the programs that a second start compiles.

    python benchmarks/compile_time.py

Each compilation runs in a process of its own, in turn, without the compile cache. Then `device_train.py` runs twice
with a cache folder that is empty at first.
"""

import argparse
import os
import re
import subprocess
import tempfile
import time

from common import REPO, command, config_of, in_turn, medians, parse, parser, report, say

LAYERS = (2, 24)


def main() -> None:
    arguments = parse(parser(__doc__, config="125M"))
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    given = arguments.overrides
    children = {str(n): {"worker": "compile_once", "overrides": [*given, f"model.layers={n}"]} for n in LAYERS}
    runs = in_turn(arguments, children)
    del os.environ["JAX_ENABLE_COMPILATION_CACHE"]
    seconds = {name: medians(records)["seconds"] for name, records in runs.items()}
    few, many = seconds.values()
    ratio = round(many / few, 3)
    report({"config": arguments.config, "seconds": seconds, "ratio": ratio, "starts": starts()})


def compile_once(arguments: argparse.Namespace) -> dict[str, float]:
    """Trace, lower and compile the step, without allocating arrays."""
    from mesh_transformer.runtime.training.session import open_session
    from mesh_transformer.train.step import TrainProgram, compile_step

    config = config_of(arguments)
    session = open_session(config)
    began = time.perf_counter()
    program = TrainProgram(session.placement, config)
    compile_step(program, config.optimizer.gradient_accumulation_steps, session.microbatch)
    return {"seconds": round(time.perf_counter() - began, 2)}


def starts() -> list[dict[str, float]]:
    """Two starts of the same training command: programs compiled, programs read, seconds of the whole process."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in (1, 2):
            changes = ["optimizer.total_steps=2", f"checkpoint.model_dir={folder}/run{number}"]
            train = command("device_train.py", "configs/tiny_shakespeare.json", changes)
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled"}
            began = time.perf_counter()
            child = subprocess.run(train, cwd=REPO, env=environment, stderr=subprocess.PIPE, text=True, check=True)
            match = re.search(r"(\d+) programs? compiled, (\d+) read", child.stderr)
            if match is None:
                raise RuntimeError(child.stderr)
            seconds = round(time.perf_counter() - began, 1)
            results.append({"compiled": int(match[1]), "read": int(match[2]), "seconds": seconds})
            say(f"start {number}: {results[-1]}")
    return results


if __name__ == "__main__":
    main()
