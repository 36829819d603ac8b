"""Fixtures of the checkpoint tests."""

from collections.abc import Iterator

import pytest
from gcs_server import GcsServer


@pytest.fixture(scope="session")
def _gcs_server() -> Iterator[GcsServer]:
    with GcsServer() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)  # for the whole session: TensorStore and gcsfs read them once
        yield server


@pytest.fixture
def gcs(_gcs_server: GcsServer) -> Iterator[GcsServer]:
    """An empty loopback Google Cloud Storage."""
    _gcs_server.clear()
    yield _gcs_server
    _gcs_server.clear()
