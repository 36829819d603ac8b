"""Shared code of the benchmarks: child processes that run in turn, and results as one JSON object on standard
output."""

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import timeit
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

REPO = Path(__file__).resolve().parents[1]
# benchmarks use helpers of the tests
sys.path += [str(REPO / "tests"), str(REPO)]
PACKAGES = (
    *("jax", "jaxlib", "torch", "transformers"),
    *(name for cuda in (12, 13) for name in (f"jax-cuda{cuda}-plugin", f"nvidia-cudnn-cu{cuda}")),
)
"""The packages whose versions are reported."""


def parser(description: str | None, *, config: str | None = "70M", rounds: int | None = 5) -> argparse.ArgumentParser:
    """A parser with --config and --set, unless `config` is None, and with --rounds, unless `rounds` is None."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if config is not None:
        made.add_argument("--config", default=str(REPO / f"configs/{config}.json"))
        made.add_argument("--set", action="append", default=[], dest="overrides", metavar="group.key=value")
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds)
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The parsed arguments. In a process that `child` started: run its worker, print the result and exit."""
    made.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.worker:
        given = argparse.Namespace(**arguments.worker)
        emit(getattr(sys.modules["__main__"], given.worker)(given))
        raise SystemExit
    return arguments


def child(arguments: argparse.Namespace, **changes: Any) -> dict[str, Any]:
    """Run this script in a child process with these arguments and changes, and return its result. The change `worker`
    names the function that the child calls with all arguments.

    Raises:
        RuntimeError: the child failed; its output is on standard error.
    """
    given = json.dumps({**vars(arguments), **changes})
    again = [sys.executable, os.path.abspath(sys.argv[0]), "--worker", given]
    done = subprocess.run(again, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {' '.join(again)}")
    return json.loads(done.stdout.splitlines()[-1])


def in_turn(
    arguments: argparse.Namespace, children: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Run each child, defined by its changes, once, and repeat that --rounds times."""
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    for number in range(arguments.rounds):
        for name, changes in children.items():
            load = os.getloadavg()[0]
            results[name].append(child(arguments, **changes))
            text = json.dumps(results[name][-1])
            say(f"round {number + 1}/{arguments.rounds}, load before {load:.1f}: {name} {text}")
    return results


def command(program: str, config: str, overrides: Sequence[str], *more: str) -> list[str]:
    """The command line of an entry point of the project."""
    return [sys.executable, program, "--config", config, *(f"--set={change}" for change in overrides), *more]


def config_of(arguments: argparse.Namespace) -> Any:
    """The config of --config and --set."""
    from mesh_transformer.config import load_config

    return load_config(arguments.config, arguments.overrides)


def random_tokens(config: Any, accumulation: int, batch: int) -> np.ndarray:
    """A random batch, int32 (accumulation, batch, seq + 1)."""
    shape = (accumulation, batch, config.seq + 1)
    return np.random.default_rng(0).integers(0, min(config.model.n_vocab, 50257), shape, dtype=np.int32)


class OwnStep:
    """The training step of a config, as the trainer builds it, on random weights and tokens. A call runs one step, on
    another batch if one is given."""

    def __init__(self, config: Any):
        import jax

        from mesh_transformer.runtime.training.session import open_session
        from mesh_transformer.sequences import Sequences
        from mesh_transformer.train.step import TrainProgram

        self.session = open_session(config)
        self.program = TrainProgram(self.session.placement, config)
        self.state = self.program.init(jax.random.key(0))
        accumulation = config.optimizer.gradient_accumulation_steps
        tokens = random_tokens(config, accumulation, self.session.microbatch)
        self.tokens = self.session.place_batch(Sequences(tokens))

    def __call__(self, batch: Any = None) -> None:
        import jax

        self.state, metrics = self.program.train_step(self.state, self.tokens if batch is None else batch)
        jax.block_until_ready(metrics)


def median_seconds(step: Callable[[], object], count: int, warm_up: int = 2) -> float:
    """Seconds of one step: the median of `count` steps after `warm_up` steps."""
    return statistics.median(timeit.repeat(step, number=1, repeat=warm_up + count)[warm_up:])


def medians(records: Sequence[Mapping[str, Any]], *keys: str) -> dict[str, float]:
    """The medians over all rounds of the figures `keys`, or of all figures."""
    return {key: median([record[key] for record in records]) for key in keys or records[0]}


def median(values: Sequence[float]) -> float:
    """The median, to four significant digits."""
    return float(f"{statistics.median(values):.4g}")


def peak_memory_mib() -> int:
    """The peak resident set of this process (VmHWM; getrusage would include the parent's at the fork)."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024


def own_peak_memory_mib() -> float:
    """The peak memory of the device, if JAX reports it, else of this process."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 2**20 if "peak_bytes_in_use" in stats else peak_memory_mib()


def machine() -> dict[str, Any]:
    """A description of this machine."""
    there = {package.name: package.version for package in metadata.distributions()}
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": {name: there[name] for name in PACKAGES if name in there},
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def emit(result: Mapping[str, Any]) -> None:
    """Print one line of JSON to standard output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def report(result: Mapping[str, Any]) -> None:
    """Print the result of this benchmark, with the description of the machine, as one line of JSON."""
    emit({"benchmark": Path(sys.argv[0]).stem, **result, "machine": machine()})


def end(differences: Sequence[str]) -> None:
    """Print differences between results that must be equal to standard error; exit with code 1 if there are any."""
    for difference in differences:
        say(f"different: {difference}")
    if differences:
        raise SystemExit(1)


def say(text: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(text + "\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    name = re.search("^model name.*: (.+)", info.read_text(), re.MULTILINE) if info.exists() else None
    return name[1] if name else platform.processor()
