"""A TPU API on loopback for each test, and the project's own view of it."""

from collections.abc import Iterator

import pytest
from support.tpu_api import TpuApi

from mesh_transformer.cloud.api import Timing
from mesh_transformer.cloud.tpus import Tpus

TIMING = Timing(call_s=10, retry_s=3, pause_s=0.02, longest_pause_s=0.1)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[TpuApi]:
    """The server; this process is led to it."""
    with TpuApi() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def tpus(api: TpuApi) -> Tpus:
    """The project's client, in a hurry."""
    return Tpus("europe-west4-a", timing=TIMING)
