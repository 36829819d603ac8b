"""The numbers of hosts and workers, and the environment in which a cluster starts its workers."""

from typing import Any

import pytest
from jax._src.clusters.cloud_tpu_cluster import GkeTpuCluster
from support.commands import CONFIG

from mesh_transformer.cluster.backends.agents import AgentCluster
from mesh_transformer.cluster.base import Job, Poll, Status, Variables
from mesh_transformer.cluster.driver.display import Display
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError


class Recorder(AgentCluster):
    """Hosts without processes. It keeps the environments of the workers."""

    def _open_agents(self) -> None:
        """There are none."""

    def _call(self, method: str, arguments: Any, timeout_s: float) -> list[Any]:
        if method == "start":
            self.environments: list[Variables] = [variables for *_, variables in arguments]
        return ["10.0.0.7:1234" if method == "coordinator" else 0] * self.count

    def kill(self) -> None:
        """There is nothing to kill."""


def environments(*arguments: Any) -> list[Variables]:
    cluster = Recorder(*arguments)
    cluster.start(Job.of("train", parse_config(CONFIG)))
    return cluster.environments


def test_one_slice() -> None:
    found = environments(2, {"A": "b"})
    assert found[1] == {
        "A": "b", "JAX_COORDINATOR_ADDRESS": "10.0.0.7:1234", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1",
    }  # fmt: skip


@pytest.mark.parametrize("port", [None, "8090"])
def test_several_slices(port: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX on a TPU derives the same numbers of processes from the same variables of the slices."""
    found = environments(6, {"MEGASCALE_PORT": port} if port else None, 3)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "first,second")
    for i, variables in enumerate(found):
        for name, value in {**variables, "TPU_WORKER_ID": str(i % 2)}.items():
            monkeypatch.setenv(name, value or "")
        assert variables["MEGASCALE_SLICE_ID"] == str(i // 2)
        assert variables["MEGASCALE_PORT"] == (port or "8080")
        assert variables["MEGASCALE_COORDINATOR_ADDRESS"] == f"10.0.0.7:{port or 8080}"
        assert (variables["JAX_NUM_PROCESSES"], variables["JAX_PROCESS_ID"]) == ("6", str(i))
        assert (GkeTpuCluster.get_process_count(), GkeTpuCluster.get_process_id()) == (6, i)
        assert GkeTpuCluster.get_coordinator_address(10, "1234") == variables["JAX_COORDINATOR_ADDRESS"]


@pytest.mark.parametrize(("slices", "shown"), [(1, "[2] lost\n"), (3, "[2 of slice 1] lost\n")])
def test_lines_of_workers(slices: int, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Recorder(6, None, slices)
    statuses = tuple(Status(i) for i in range(6))
    Display(label=cluster.label).show(Poll(statuses, lines=((2, "lost"),)))
    assert capsys.readouterr().err == shown


# the output of workers beside others that were killed or stopped, as it was
OUTPUT = """\
[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
 peer ranks. Expected number of connected peer ranks is : 0
3

01:26:03 I 872,640 parameters
W1125 01:26:57.748565   20908 preemption_notifier.cc:90] SIGTERM caught at 2026-11-25T01:26:57.748563892+00:00
01:27:18 W [process=0][thread=save_finalize] Reached preemption sync point, step=2
01:26:31 W a warning of this program
E1125 01:26:32.309256   19889 coordination_service.cc:1549] [927085264571945752] Use error polling: UNAVAILABLE: The \
following tasks are unhealthy (stopped sending heartbeats):
1
The tasks have crashed. Check the task logs for an earlier error [type.googleapis.com/tensorflow='']
F1125 01:26:32.310015   19900 client.h:80] Terminating process because the JAX distributed service detected fatal \
errors.

RPC: /xla.coordination.CoordinationService/PollForError [type.googleapis.com/tensorflow='']
*** Check failure stack trace: ***
    @     0x7fee55440634  absl::lts_20260107::log_internal::LogMessage::SendToLog()
Traceback (most recent call last):
  File "a.py", line 1, in <module>
01:26:33 E reported to the driver: JaxRuntimeError: UNKNOWN: Gloo all-reduce failed
"""


@pytest.mark.parametrize("worker_id", [0, 1])
def test_lines_of_libraries_need_verbose(worker_id: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [(worker_id, line) for line in OUTPUT.splitlines()]
    statuses = (Status(0), Status(1))

    def shown(display: Display, *polls: list[tuple[int, str]]) -> list[str]:
        for poll in polls:
            display.show(Poll(statuses, lines=tuple(poll)))
        return [line.removeprefix(f"[{worker_id}] ") for line in capsys.readouterr().err.splitlines()]

    expected = [
        "01:26:03 I 872,640 parameters",
        "01:26:31 W a warning of this program",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
    ]
    # a message may arrive in parts
    assert shown(Display(), lines[:11], lines[11:]) == expected[worker_id:]
    assert shown(Display(verbose=True), lines) == OUTPUT.splitlines()


def test_labels_of_ray_nodes() -> None:
    """TPU worker IDs begin at 0 in each slice, so they number the hosts of one slice only."""
    ray_cluster = pytest.importorskip("mesh_transformer.cluster.backends.ray_cluster")

    def node(address: str, label: int, **resources: int) -> dict[str, Any]:
        labels = {ray_cluster.LABEL: str(label)}
        return {"Alive": True, "Resources": resources, "Labels": labels, "NodeManagerAddress": address}

    one = [node("10.0.0.1", 0), node("10.0.0.2", 1)]
    assert ray_cluster._nodes_by_host(one) == dict(enumerate(one))
    # Ray may still list the node that ran before on the same host
    ray_cluster._nodes_by_host([*one, node("10.0.0.2", 1)])
    with pytest.raises(UserError, match=r"tpu-worker-id=\[1\]: number the hosts of all slices, slice by slice"):
        ray_cluster._nodes_by_host([*one, node("10.0.0.3", 1)])
    both = [node(f"10.0.0.{i}", i % 2, **{f"tpu_worker_{i}": 1}) for i in range(4)]
    assert ray_cluster._nodes_by_host(both) == dict(enumerate(both))
