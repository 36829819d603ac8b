"""Two drivers of one run: the second one is rejected while the first one lives, and takes over after its death."""

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
from mesh_transformer.cluster.host import agent, processes
from mesh_transformer.cluster.host.agent import TakenOver
from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError

REJECTED = "another driver.* is running this run: end that one first"


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessCluster]:
    """The cluster of a driver that is attached to its agents."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cluster = ProcessCluster("a", 2)
    cluster.attach()
    yield cluster
    cluster.kill()


def of_the_same_agents(cluster: ProcessCluster) -> ProcessCluster:
    """The cluster of another driver that has found the same agents, as a driver finds agents on Ray by name."""
    other = ProcessCluster("a", 2)
    other._agents = cluster._agents
    return other


def test_agents_keep_their_driver_while_it_is_in_contact(
    first: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "TAKEOVER_TIMEOUT_S", 0.5)
    # on a busy machine the first driver may be silent for longer than the default
    monkeypatch.setattr(agent, "TAKEOVER_AFTER_S", 600)
    second = of_the_same_agents(first)
    with pytest.raises(UserError, match=REJECTED):
        second.attach()
    first.poll()
    with pytest.raises(TakenOver):
        second.stop()


def test_a_second_driver_takes_over_the_agents_of_a_dead_one(
    first: ProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The takeover happens after TAKEOVER_AFTER_S without contact. Later calls of the first driver are rejected."""
    monkeypatch.setattr(agent, "TAKEOVER_AFTER_S", 1.0)
    second = of_the_same_agents(first)
    first.poll()
    contact_at = time.monotonic()
    second.attach()
    assert time.monotonic() - contact_at >= 1.0
    with pytest.raises(TakenOver, match="another driver has taken over this run"):
        first.poll()
    # the fixture ends the agents through `first`
    first._driver = second._driver


def test_a_driver_of_processes_of_this_machine_has_a_lock(first: ProcessCluster) -> None:
    """Agents in the driver's process cannot detect another driver, whose workers would end those of the first one."""
    with pytest.raises(UserError, match=rf"another driver \(process {os.getpid()}\) is running this run"):
        ProcessCluster("a", 2).attach()
    other_run = ProcessCluster("b", 1)
    other_run.attach()
    other_run.kill()
    first.kill()
    successor = ProcessCluster("a", 2)
    successor.attach()
    with pytest.raises(UserError, match=REJECTED):
        first.attach()
    successor.kill()
    first.attach()


def test_a_second_command_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_environment) -> None:
    write(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    held = processes.lock_driver(run_name(load_config("config.json")))
    with driver(tmp_path, "--processes", "2", **worker_environment, TMPDIR=str(tmp_path)) as second:
        errors = second.finish(2)
    os.close(held)
    assert f"error: another driver (process {os.getpid()}) is running this run: end that one first" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()
