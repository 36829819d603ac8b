"""Fixtures for tests with real workers: their devices, an uninterrupted run, a Ray cluster on loopback."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import run as run_command
from support.counting import NAME, write_task
from support.driving import STEPS, driver, write
from support.ray_cluster import RayNodes, ray_cluster
from support.xla import cpu_flags

START_S = 120


@pytest.fixture(scope="session")
def worker_environment() -> dict[str, str]:
    """Two CPU devices for each worker."""
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": cpu_flags(2),
        "HF_HUB_OFFLINE": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, worker_environment: dict[str, str]) -> Path:
    """The folder of an uninterrupted run of two processes."""
    folder = tmp_path_factory.mktemp("straight")
    write(folder)
    with driver(folder, "--processes", "2", **worker_environment, TMPDIR=str(folder)) as run:
        lines = [line.strip().partition(" ")[2] for line in run.finish().splitlines()]
    last = lines[-1]
    assert lines[0].endswith(" I starting 2 workers")
    assert "compiling: training step" in "\n".join(lines)
    # nothing of Gloo, XLA or JAX
    assert [line for line in lines if not re.match(r"(\[[01]\] )?\d\d:\d\d:\d\d [IW] (?!\[process)", line)] == []
    assert f" I reached step {STEPS} of {STEPS}, val loss " in last, last
    assert last.endswith("; checkpoint run/step_120; sample: python device_sample.py --ckpt run --prompt Hello")
    return folder / "run"


@pytest.fixture
def evaluated(straight: Path, worker_environment: dict[str, str], tmp_path: Path) -> Callable[..., float]:
    """Evaluates the last checkpoint of `straight` with eval_harness.py and further arguments. Returns a number of the
    report."""
    pytest.importorskip("lm_eval")
    tasks, report_path = write_task(tmp_path), tmp_path / "found.json"
    command = [
        "--config",
        "config.json",
        "--tasks",
        NAME,
        "--include-path",
        str(tasks),
        "--output",
        str(report_path),
    ]
    environment = {"HF_HOME": str(tmp_path / "hf"), **worker_environment}

    def evaluate(*more: str, **further: str) -> float:
        report_path.unlink(missing_ok=True)
        output, _ = run_command("eval_harness.py", *command, *more, cwd=straight.parent, **environment, **further)
        assert NAME in output
        report = json.loads(report_path.read_text())
        assert report["evaluation"]["step"] == STEPS
        return report["results"][NAME]["byte_perplexity,none"]

    return evaluate


@pytest.fixture(scope="module")
def ray_nodes(worker_environment: dict[str, str]) -> Iterator[RayNodes]:
    pytest.importorskip("ray")
    with ray_cluster(worker_environment) as nodes:
        yield nodes
