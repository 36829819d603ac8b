"""One worker process of a run on a host at a time: a new one waits for the one before, which may be saving."""

from __future__ import annotations

import fcntl
import os
import signal
import tempfile
import time

from mesh_transformer.logs import log

WAIT_S = 20.0
_AFTER_KILL_S = 10.0


def folder() -> str:
    """Where this user's runs keep their locks and the output of their workers on this host; made if missing."""
    path = os.path.join(tempfile.gettempdir(), f"mesh-transformer-{os.getuid()}")
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def hold(run: str, worker_id: int, wait_s: float = WAIT_S) -> int:
    """Take the lock of a worker of a run, for as long as this process lives. Returns its file descriptor.

    A process that still holds it after `wait_s` is killed: it is of a job that is over for everybody else.

    Raises:
        OSError: even that does not free it.
    """
    file = os.open(
        os.path.join(folder(), f"{run}-{worker_id}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
    )
    if not _taken(file, wait_s):
        holder = int(os.pread(file, 20, 0) or b"0")
        log.warning("killing process %d, which a former driver left behind", holder)
        if holder > 1:
            os.kill(holder, signal.SIGKILL)
        if not _taken(file, _AFTER_KILL_S):
            raise OSError(
                f"process {holder} holds the lock of worker {worker_id} of {run}, and cannot be killed"
            )
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)
    return file


def _taken(file: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
