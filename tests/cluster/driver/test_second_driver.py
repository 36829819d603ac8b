"""Two drivers of one run: the second is refused while the first lives, and takes over when it is gone."""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.driving import driver, write

from mesh_transformer.cluster.backends import agents
from mesh_transformer.cluster.backends.agents import ProcessCluster
from mesh_transformer.cluster.base import run_name
from mesh_transformer.cluster.host import agent
from mesh_transformer.cluster.host import processes as host
from mesh_transformer.cluster.host.agent import TakenOver
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError

REFUSED = "another driver.* is running this run: end that one first"


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    """The cluster of a driver that has attached to its agents."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = ProcessCluster("a", 2)
    made.attach()
    yield made
    made.kill()


def of_the_same_agents(cluster: ProcessCluster) -> ProcessCluster:
    """The cluster of another driver that has found them, as one finds Ray's by their names."""
    other = ProcessCluster("a", 2)
    other._agents = cluster._agents
    return other


def test_agents_obey_their_driver_while_it_asks(
    first: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "TAKEOVER_TIMEOUT_S", 0.5)
    second = of_the_same_agents(first)
    began = time.monotonic()
    with pytest.raises(UserError, match=REFUSED):
        second.attach()
    assert time.monotonic() - began < agent.TAKEOVER_AFTER_S
    first.poll()
    with pytest.raises(TakenOver):
        second.stop()


def test_agents_of_a_driver_that_is_gone_are_taken_over(
    first: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before it has been silent for as long as that takes; then it is obeyed no more."""
    monkeypatch.setattr(agent, "TAKEOVER_AFTER_S", 1.0)
    second = of_the_same_agents(first)
    first.poll()
    asked = time.monotonic()
    second.attach()
    assert time.monotonic() - asked >= 1.0
    with pytest.raises(TakenOver, match="another driver has taken over this run"):
        first.poll()
    first._driver = second._driver  # who ends them


def test_a_driver_of_processes_of_this_machine_has_a_lock(first: ProcessCluster) -> None:
    """Agents in the driver's own process cannot tell of another one; its workers would end those of the first."""
    with pytest.raises(UserError, match=rf"another driver \(process {os.getpid()}\) is running this run"):
        ProcessCluster("a", 2).attach()
    other_run = ProcessCluster("b", 1)
    other_run.attach()
    other_run.kill()
    first.kill()
    successor = ProcessCluster("a", 2)
    successor.attach()
    with pytest.raises(UserError, match=REFUSED):
        first.attach()
    successor.kill()
    first.attach()


def test_a_second_command_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_environment
) -> None:
    write(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    held = host.lock_driver(run_name(load_config("config.json")))
    with driver(tmp_path, "--processes", "2", **worker_environment, TMPDIR=str(tmp_path)) as second:
        errors = second.finish(2)
    os.close(held)
    assert f"error: another driver (process {os.getpid()}) is running this run: end that one first" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()
