"""The processes of a job: which variables name them, and the address at which the coordinator listens."""

import re
import socket

import jax
import pytest
from support.commands import free_port

from mesh_transformer.errors import UserError
from mesh_transformer.platforms import join_job, require_one_process

# an address reserved for examples
ELSEWHERE = "203.0.113.7"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of process 0 of two, starts it, and returns the arguments of JAX's call."""

    def start(address: str, **variables: str) -> dict[str, object]:
        asked: dict[str, object] = {}
        monkeypatch.setattr(
            jax.distributed,
            "initialize",
            lambda address, *others, **named: asked.update(named, address=address, others=others),
        )
        given = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": "0",
            **variables,
        }
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        join_job()
        return asked

    monkeypatch.delenv("JAX_COORDINATOR_BIND_ADDRESS", raising=False)
    return start


def test_it_listens_at_the_given_address_or_another_one_of_its_machine(job) -> None:
    port = free_port()
    given = f"localhost:{port}"
    assert job(given)["coordinator_bind_address"] == given
    behind = f"127.0.0.1:{port}"
    asked = job(f"{ELSEWHERE}:{port}", JAX_COORDINATOR_BIND_ADDRESS=behind)
    assert (asked["address"], asked["coordinator_bind_address"]) == (f"{ELSEWHERE}:{port}", behind)
    # only process 0 listens
    job(f"{ELSEWHERE}:{port}", JAX_PROCESS_ID="1")


@pytest.mark.parametrize(
    "address",
    [
        *(f"{ELSEWHERE}:1234", "nowhere.invalid:1234", "localhost", "localhost:x"),
        # with these jaxlib would listen elsewhere, or end with a segmentation fault or a bare error
        *("localhost:0", "localhost:99999", "localhost:٣٣٣٣", "::1:1234"),
    ],
)
def test_an_address_where_it_cannot_listen_is_refused(job, address: str) -> None:
    with pytest.raises(UserError, match=re.escape(address)):
        job(address)


def test_a_port_in_use_is_refused(job) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="another process listens"),
    ):
        job(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.fixture
def step(job, monkeypatch: pytest.MonkeyPatch):
    """Sets what srun sets in process 1 of 4, starts the process, and returns the arguments of JAX's call."""

    def start(hosts: str = "n[01-04]", **changes: str) -> dict[str, object]:
        given = {
            "SLURM_STEP_NODELIST": hosts,
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "1",
            "SLURM_JOB_ID": "4098",
            "SLURM_STEP_ID": "0",
            # with one task a host, JAX's own detection would hide all GPUs but this one
            "SLURM_LOCALID": "0",
            **changes,
        }
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        return job("", JAX_NUM_PROCESSES=changes.get("JAX_NUM_PROCESSES", ""), JAX_PROCESS_ID="")

    return start


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[01-04]", "n01"),
        ("n[07,09-11],login[1-2]", "n07"),
        ("rack1-n[08-09].example.org", "rack1-n08.example.org"),
        ("rack[1-2]n[3-4],other", "rack1n3"),
    ],
)
def test_a_step_of_slurm_is_a_job(step, hosts: str, first: str) -> None:
    asked = step(hosts)
    assert (asked["address"], asked["others"]) == (f"{first}:61442", (4, 1))
    # all devices of the host
    assert asked["cluster_detection_method"] == "deactivate"
    assert step(hosts, SLURM_STEP_ID="1")["address"] == f"{first}:61443"


def test_tasks_of_slurm_that_are_no_job(step, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="one of 4, with the first at n01:61442: start it with srun --ntasks=1"):
        step() and require_one_process()
    for alone in ({"SLURM_STEP_NUM_TASKS": "1"}, {"JAX_NUM_PROCESSES": "1"}):
        assert step(**alone) == {}
        require_one_process()
    # a batch script has the other variables too
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    join_job()
