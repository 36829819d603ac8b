"""A server with the TPU API on loopback for each test, and a client for it."""

from collections.abc import Iterator

import pytest
from support.tpu_api import TpuApi

from mesh_transformer.cloud.api import Timing
from mesh_transformer.cloud.tpus import Tpus

TIMING = Timing(call_s=10, retry_s=3, pause_s=0.02, longest_pause_s=0.1)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[TpuApi]:
    """The server. The environment of this process selects it."""
    with TpuApi() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def tpus(api: TpuApi) -> Tpus:
    """The project's client, with short pauses."""
    return Tpus("europe-west4-a", timing=TIMING)
