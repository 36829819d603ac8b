"""The pod of hosts, one for each test file. It starts within a second; workers of pytest-xdist take turns."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import PodOfHosts, why_not
from support.waiting import LONG_S

from mesh_transformer.cloud.hosts import Access, Host
from mesh_transformer.cloud.pod import Pod

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.pod)


@pytest.fixture(scope="module")
def hosts() -> Iterator[PodOfHosts]:
    """Four hosts."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with PodOfHosts(4) as made:
        yield made


@pytest.fixture
def access(hosts: PodOfHosts) -> Access:
    """A login that every host accepts."""
    return Access(str(hosts.known_hosts), user="root", key_file=str(hosts.key_file), connect_timeout_s=LONG_S)


@pytest.fixture
def pod(hosts: PodOfHosts, access: Access) -> Pod:
    """The hosts as a `Pod`."""
    return Pod(tuple(Host(i, address) for i, address in enumerate(hosts.addresses)), access)


@pytest.fixture(autouse=True)
def no_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an SSH agent, so that only the test's key is used."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    assert "SSH_AUTH_SOCK" not in os.environ
