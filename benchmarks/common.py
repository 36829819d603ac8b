"""What the benchmarks share: child processes that run in turn, and one JSON object of results on standard output."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[1]
QUIET_LOAD = 1.0  # of the last minute, before a run: more than this is other people's work


def in_turn(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Run every command once, then all again, `rounds` times; each prints one JSON object as its last line.

    Raises:
        RuntimeError: a command failed; its output went to standard error.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in commands}
    for number in range(rounds):
        for name, command in commands.items():
            load = os.getloadavg()[0]
            child = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, text=True, check=False)
            if child.returncode:
                raise RuntimeError(f"{name}: exit code {child.returncode}: {' '.join(command)}")
            result = json.loads(child.stdout.splitlines()[-1])
            results[name].append(result)
            say(f"round {number + 1}/{rounds}, load before {load:.1f}: {name} {json.dumps(result)}")
    return results


def this_script(script: str, *arguments: str) -> list[str]:
    """The command that runs `script` again, with these arguments, as a child."""
    return [sys.executable, script, *arguments]


def parser(
    description: str | None, *, config: str = "70M", workers: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """--config, --set, --rounds, and the hidden --worker by which a benchmark runs one of its own parts."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--config", default=str(REPO / f"configs/{config}.json"))
    made.add_argument("--set", action="append", default=[], dest="overrides", metavar="group.key=value")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--worker", choices=list(workers), help=argparse.SUPPRESS)
    return made


def of_config(arguments: argparse.Namespace) -> list[str]:
    """--config and --set again, for a child."""
    return ["--config", arguments.config, *(part for item in arguments.overrides for part in ("--set", item))]


def median(values: Sequence[float]) -> float:
    """To four significant digits."""
    return float(f"{statistics.median(values):.4g}")


def peak_memory_mib() -> int:
    """The largest resident set of this process so far (VmHWM; getrusage would count the parent's at the fork too)."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {}
    for package in ("jax", "jaxlib", "torch", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "versions": versions,
        "load_at_end": round(os.getloadavg()[0], 2),
    }


def emit(result: Mapping[str, Any]) -> None:
    """One line of JSON on standard output."""
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def end(differences: Sequence[str]) -> None:
    """Exit with code 1 if results that must be the same are not, and say where, on standard error."""
    for difference in differences:
        say(f"not the same: {difference}")
    if differences:
        raise SystemExit(1)


def say(text: str) -> None:
    """A line for people, on standard error."""
    sys.stderr.write(text + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
