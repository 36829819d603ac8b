"""eval_harness.py on two workers: tables and report as those of one process."""

from __future__ import annotations

import json

import pytest
from commands import run, write_run
from counting import NAME, write_task

pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.slow]


@pytest.fixture
def evaluated(tmp_path, worker_environment):
    """Evaluates the checkpoint of a short run with these further arguments; returns the report."""
    write_run(tmp_path, optimizer={"total_steps": 2}, data={"val_set": {}})
    write_task(tmp_path)
    run("device_train.py", "--config", "config.json", cwd=tmp_path)
    environment = {"HF_HOME": str(tmp_path / "hf"), **worker_environment}
    command = [
        "--config",
        "config.json",
        "--tasks",
        NAME,
        "--include-path",
        "tasks",
        "--output",
        "found.json",
    ]

    def evaluate(*more, **further):
        output, _ = run("eval_harness.py", *command, *more, cwd=tmp_path, **environment, **further)
        assert NAME in output
        report = json.loads((tmp_path / "found.json").read_text())
        assert report["evaluation"]["step"] == 2
        return report["results"][NAME]["byte_perplexity,none"]

    return evaluate


@pytest.mark.multiprocess
def test_the_same_numbers_on_two_workers(evaluated, tmp_path):
    together = evaluated("--processes", "2", TMPDIR=str(tmp_path))
    assert together == pytest.approx(evaluated(), rel=1e-5)


@pytest.mark.faults
def test_the_same_numbers_on_a_ray_cluster(evaluated, ray_nodes):
    together = evaluated("--ray-address", ray_nodes.address)
    assert together == pytest.approx(evaluated(), rel=1e-5)
