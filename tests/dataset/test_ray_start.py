"""A cluster that does not start at once."""

import logging

import pytest
import ray

from mesh_transformer.dataset.tasks import OnRay
from mesh_transformer.errors import UserError

REASON = "The current node timed out during startup.\nThis could happen because ..."


def starts(monkeypatch: pytest.MonkeyPatch, failures: int) -> list[str]:
    """Let so many starts of Ray fail. Returns what is called."""
    called: list[str] = []

    def init(**_: object) -> None:
        called.append("init")
        if called.count("init") <= failures:
            raise Exception(REASON)

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: called.append("shutdown"))
    return called


def test_a_start_that_fails_once_is_repeated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    called = starts(monkeypatch, failures=1)
    with caplog.at_level(logging.WARNING, logger="mesh_transformer"):
        OnRay(None, workers=2)._join()
    assert called == ["init", "shutdown", "init"]
    assert "Ray did not start: The current node timed out during startup. It starts a second time" in caplog.text


def test_a_start_that_fails_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    called = starts(monkeypatch, failures=2)
    with pytest.raises(
        UserError, match=r"does not start .*: The current node timed out during startup\. Use --workers 1"
    ):
        OnRay(None, workers=2)._join()
    assert called == ["init", "shutdown"] * 2
