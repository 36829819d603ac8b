"""What a worker reports of an error."""

import os

import jax
import jax.numpy as jnp
import pytest

from mesh_transformer.cluster.base import WorkerError
from mesh_transformer.cluster.host.worker import Worker


class Ended(BaseException):
    """In place of the end of this process."""


class Pipe:
    """The worker's end of the pipe to its agent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []

    def send(self, event: dict[str, object]) -> None:
        self.sent.append(event)


def test_a_device_without_memory_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would occur again after a restart."""
    codes, pipe = [], Pipe()

    def leave(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(jax.errors.JaxRuntimeError) as failure:
        jax.block_until_ready(jnp.zeros(1 << 46))
    for error in (failure.value, MemoryError("of the host")):
        with pytest.raises(Ended):
            Worker(pipe)._report(error)  # type: ignore[arg-type]
    errors = [event["error"] for event in pipe.sent]
    assert all(isinstance(error, WorkerError) for error in errors)
    assert [error.category for error in errors] == ["run", "machine"]
    assert errors[0].message.startswith("out of memory (")
    assert codes == [1, 1]
