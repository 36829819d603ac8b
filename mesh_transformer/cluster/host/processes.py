"""Locks, logs and processes of runs on a host.

Locks and logs are in a folder of the user, below the temporary folder (`cache_folders.open_temporary`). Files are
opened without following links.

One worker process of a run has the lock at a time. A new one waits for the previous one, which may be saving. One
driver has the lock at a time, if the workers are processes of its own machine.

Worker and agent processes that do not answer are killed. A process ID may be reused, so every kill checks the process.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from mesh_transformer import cache_folders
from mesh_transformer.cluster.base import Process
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

LOCK_TIMEOUT_S = 20.0
_AFTER_KILL_S = 10.0
# parts of command lines
WORKER = b"mesh_transformer.cluster.host.worker"
AGENT = b"ray::Agent"


def open_file(name: str, flags: int) -> int:
    """Open a file of the user's folder, and create both if needed. Returns the file descriptor.

    Args:
        name: name of the file, without a folder.
        flags: as for `os.open`.

    Raises:
        UserError: the folder or the file is a link, or other users can access the folder.
    """
    parent = tempfile.gettempdir()
    folder = cache_folders.open_temporary(parent)
    try:
        return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        path = os.path.join(cache_folders.temporary(parent), name)
        raise cache_folders.unsafe(path, f"cannot be opened, or is a link ({error.strerror})") from error
    finally:
        os.close(folder)


def worker_name(run: str, worker_id: int) -> str:
    """The name of a worker of a run in its lock, its log and its command line."""
    return f"{run}-{worker_id}"


def lock_worker(run: str, worker_id: int, wait_s: float = LOCK_TIMEOUT_S) -> int:
    """Acquire the lock of a worker of a run until this process ends. Returns the file descriptor of the lock.

    A worker of this run that still holds the lock after `wait_s` is killed, because its job has ended elsewhere. Any
    other process is not killed.

    Raises:
        UserError: other users can access the folder of the locks.
        OSError: another process still holds the lock.
    """
    name = worker_name(run, worker_id)
    file = open_file(f"{name}.lock", os.O_RDWR)
    if not _lock(file, wait_s):
        holder = _read_holder(file)
        killed = _kill(holder, lambda: _command_line(holder)[-3::2] == [WORKER, name.encode()])
        if killed:
            log.warning("killed process %d, a worker that a previous driver has left", holder)
        if not _lock(file, _AFTER_KILL_S if killed else 0.0):
            why = "does not end" if killed else "is no worker of this run, so it is not killed: end it"
            raise OSError(f"the lock of worker {worker_id} of {run} is held: process {holder} {why}")
    _write_holder(file)
    return file


def lock_driver(run: str) -> int:
    """Acquire the lock of the driver of a run until the returned file descriptor is closed.

    Raises:
        UserError: another driver holds the lock, or other users can access the folder of the locks.
    """
    file = open_file(f"{run}-driver.lock", os.O_RDWR)
    if not _lock(file, 0.0):
        holder = _read_holder(file)
        os.close(file)
        raise UserError(f"another driver (process {holder}) is running this run: end that one first")
    _write_holder(file)
    return file


def _lock(file: int, wait_s: float) -> bool:
    # not above: the driver of a pod imports this module on any system
    import fcntl

    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


def _write_holder(file: int) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, str(os.getpid()).encode(), 0)


def _read_holder(file: int) -> int:
    """The process ID in a lock file; 0 if there is none."""
    text = os.pread(file, 20, 0)
    return int(text) if text.isdigit() else 0


def identify(pid: int) -> Process | None:
    """The process with this ID; None if there is none, or the system has no /proc."""
    stat = _read_proc(pid, "stat")
    return Process(pid, int(stat.rpartition(b")")[2].split()[19])) if stat else None


def kill(processes: Sequence[Process]) -> list[int]:
    """Send SIGKILL to the processes that still run and are workers or agents. Returns the IDs of these processes."""
    return [process.pid for process in processes if _kill(process.pid, partial(_is_ours, process))]


def _is_ours(process: Process) -> bool:
    line = b"\0".join(_command_line(process.pid))
    return identify(process.pid) == process and (WORKER in line or AGENT in line)


def _kill(pid: int, is_expected: Callable[[], bool]) -> bool:
    """Send SIGKILL if `is_expected`. The pidfd ensures that the check and the signal concern the same process."""
    if pid <= 1 or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return False
    with contextlib.suppress(OSError, OverflowError):
        handle = os.pidfd_open(pid)
        try:
            if is_expected():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


def _command_line(pid: int) -> list[bytes]:
    return _read_proc(pid, "cmdline").removesuffix(b"\0").split(b"\0")


def _read_proc(pid: int, name: str) -> bytes:
    """A file of /proc for a process; empty if there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
