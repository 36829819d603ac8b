"""The address at which the coordinator of a job of several processes listens."""

import re
import socket

import jax
import pytest
from support.commands import free_port

from mesh_transformer.errors import UserError
from mesh_transformer.platforms import join_job

# an address reserved for examples
ELSEWHERE = "203.0.113.7"


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of process 0 of two, starts it, and returns the arguments of JAX's call."""

    def start(address: str, **variables: str) -> dict[str, object]:
        asked: dict[str, object] = {}
        monkeypatch.setattr(
            jax.distributed, "initialize", lambda address, *_, **named: asked.update(named, address=address)
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
