"""A run's folder belongs to one process at a time: the first one of the job that trains in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from types import TracebackType
from typing import Any

from mesh_transformer import signs
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

LOCK = "run.lock"
WAIT_S = 3.0  # for a process of this machine that was just killed
# for one of another machine: a file server frees the locks of a machine that is gone in some 90 s
AWAY_WAIT_S = 120.0


class RunLock:
    """Holds the lock of `folder`, which is there, from `with` to its end. The kernel frees it when this process ends.

    On a file system without locks nothing is held.

    Raises:
        UserError: on entry, if another process holds it; the message says which one.
    """

    def __init__(self, folder: str):
        self._folder, self._path = folder, os.path.join(folder, LOCK)
        self._file = -1

    def __enter__(self) -> RunLock:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            self._take()
        except BaseException:
            os.close(self._file)
            raise
        told = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(told).encode(), 0)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)

    def in_place(self) -> bool:
        """Whether the folder is still the one that was locked: neither deleted nor moved away."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _take(self) -> None:
        began = time.monotonic()
        while not self._taken():
            holder = self._holder()
            away = holder.get("host", socket.gethostname()) != socket.gethostname()
            if time.monotonic() - began > (AWAY_WAIT_S if away else WAIT_S):
                raise UserError(
                    f"checkpoint.model_dir {self._folder} is in use: process {holder.get('pid', '?')} on host "
                    f"{holder.get('host', '?')} has trained in it since {holder.get('since', '?')}. Wait for its end or stop "
                    f"it, or take another folder: --set checkpoint.model_dir=DIR"
                )
            with signs.service_call():
                time.sleep(0.1)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): see to it that one run alone writes there", self._folder, error
            )
        return True

    def _holder(self) -> dict[str, Any]:
        """What the holder has told of itself; empty while it is about to."""
        try:
            told = json.loads(os.pread(self._file, 500, 0))
        except (ValueError, RecursionError):
            return {}
        return told if isinstance(told, dict) else {}
