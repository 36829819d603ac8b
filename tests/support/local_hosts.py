"""Hosts that are folders of this machine. A shell of this machine runs their commands, with the folder as its home."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from mesh_transformer.cloud import ssh
from mesh_transformer.cloud.hosts import Access, Host
from mesh_transformer.cloud.pod import Pod


class LocalConnection:
    """The part of a fabric connection that `cloud.pod` uses."""

    def __init__(self, home: Path):
        self._home = home

    def run(self, command: str, *, out_stream: Any, err_stream: Any, **_: Any) -> Any:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._home,
            env={**os.environ, "HOME": str(self._home)},
            capture_output=True,
            text=True,
            check=False,
        )
        out_stream.write(done.stdout)
        err_stream.write(done.stderr)
        return SimpleNamespace(exited=done.returncode)

    def put(self, source: str | IO[bytes], target: str) -> None:
        if isinstance(source, str):
            shutil.copy(source, self._home / target)
        else:
            # as SFTP does, into the file that is there
            (self._home / target).write_bytes(source.read())

    def get(self, source: str, target: str) -> None:
        shutil.copy(self._home / source, target)


def local_pod(homes: list[Path], monkeypatch: pytest.MonkeyPatch) -> Pod:
    """A pod with a host for each home folder, which it creates."""

    @contextlib.contextmanager
    def connected(host: Host, *_: object) -> Iterator[LocalConnection]:
        yield LocalConnection(homes[host.worker_id])

    monkeypatch.setattr(ssh, "connected", connected)
    for home in homes:
        home.mkdir()
    return Pod(tuple(Host(i, f"10.0.0.{i}") for i in range(len(homes))), Access(__file__))
