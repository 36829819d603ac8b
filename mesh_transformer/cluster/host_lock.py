"""Locks of a run on a host.

One worker process at a time: a new one waits for the one before, which may be saving. One driver at a time, where the
workers are processes of the driver's own machine.
"""

from __future__ import annotations

import fcntl
import os
import time

from mesh_transformer.cluster import host_folder, processes_by_id
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

WAIT_S = 20.0
_AFTER_KILL_S = 10.0


def worker_name(run: str, worker_id: int) -> str:
    """Names a worker of a run: its lock, its log, and its command line have it."""
    return f"{run}-{worker_id}"


def hold(run: str, worker_id: int, wait_s: float = WAIT_S) -> int:
    """Take the lock of a worker of a run, for as long as this process lives. Returns its file descriptor.

    A worker of this run that still holds it after `wait_s` is killed: it is of a job that is over for everybody else. Any
    other process is left alone.

    Raises:
        UserError: the folder of the locks is not safe.
        OSError: the lock is held all the same.
    """
    name = worker_name(run, worker_id)
    file = host_folder.open_file(f"{name}.lock", os.O_RDWR)
    if not _taken(file, wait_s):
        holder = _holder(file)
        killed = processes_by_id.kill_worker(holder, name)
        if killed:
            log.warning("killed process %d, which a former driver left behind", holder)
        if not _taken(file, _AFTER_KILL_S if killed else 0.0):
            why = "does not end" if killed else "is no worker of it, and is left alone"
            raise OSError(f"the lock of worker {worker_id} of {run} is held: process {holder} {why}")
    _note_holder(file)
    return file


def hold_as_driver(run: str) -> int:
    """Take the lock of the driver of a run, for as long as the file descriptor that is returned is open.

    Raises:
        UserError: another driver holds it, or the folder of the locks is not safe.
    """
    file = host_folder.open_file(f"{run}-driver.lock", os.O_RDWR)
    if not _taken(file, 0.0):
        holder = _holder(file)
        os.close(file)
        raise UserError(f"another driver (process {holder}) is running this run: end that one first")
    _note_holder(file)
    return file


def _taken(file: int, wait_s: float) -> bool:
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def _note_holder(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)


def _holder(file: int) -> int:
    """The process that says it holds the lock; 0 if none does."""
    text = os.pread(file, 20, 0)
    return int(text) if text.isdigit() else 0
