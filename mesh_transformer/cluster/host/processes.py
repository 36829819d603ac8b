"""What a run has on a host outside of its folder: this user's own folder of locks and logs, and processes, found by number.

The folder lies in the temporary folder, where every user may make files and links. So it is used only if no other user can
have a hand in it, and its files are opened without following links.

Locks: one worker process at a time, a new one waits for the one before, which may be saving; one driver at a time, where the
workers are processes of the driver's own machine.

Processes of this program that do not answer are killed. A number may have passed on to a stranger, who is left alone.
"""

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial

from mesh_transformer.cluster.base import Process
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

WAIT_S = 20.0
_AFTER_KILL_S = 10.0
WORKER = b"mesh_transformer.cluster.host.worker"  # in the command line
AGENT = b"ray::Agent"


def open_file(name: str, flags: int) -> int:
    """Open a file of the folder; both are made if missing. Returns the file descriptor.

    Args:
        name: without a folder.
        flags: as of `os.open`.

    Raises:
        UserError: the folder or the file is a link, or the folder belongs or is open to others.
    """
    path = os.path.join(tempfile.gettempdir(), f"mesh-transformer-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, f"cannot be opened, or is a link or no folder ({error.strerror})") from error
    try:
        found = os.fstat(folder)
        if found.st_uid != os.getuid():
            raise _refusal(path, f"belongs to user {found.st_uid}")
        if found.st_mode & 0o077:
            raise _refusal(path, f"is open to other users (mode {found.st_mode & 0o777:o})")
        return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        raise _refusal(
            os.path.join(path, name), f"cannot be opened, or is a link ({error.strerror})"
        ) from error
    finally:
        os.close(folder)


def _refusal(path: str, why: str) -> UserError:
    return UserError(
        f"{path} {why}, so other users may have a hand in the locks of your runs: remove it, or set TMPDIR to a folder "
        "of your own"
    )


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
    file = open_file(f"{name}.lock", os.O_RDWR)
    if not _taken(file, wait_s):
        holder = _holder(file)
        killed = _kill(holder, lambda: _command_line(holder)[-3::2] == [WORKER, name.encode()])
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
    file = open_file(f"{run}-driver.lock", os.O_RDWR)
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


def identify(pid: int) -> Process | None:
    """The process that has this number now; None if there is none, or the system has no /proc."""
    stat = _of_proc(pid, "stat")
    return Process(pid, int(stat.rpartition(b")")[2].split()[19])) if stat else None


def kill(processes: Sequence[Process]) -> list[int]:
    """SIGKILL to those of these processes that are still there, and are workers or agents. Returns their numbers."""

    return [process.pid for process in processes if _kill(process.pid, partial(_is_ours, process))]


def _is_ours(process: Process) -> bool:
    line = b"\0".join(_command_line(process.pid))
    return identify(process.pid) == process and (WORKER in line or AGENT in line)


def _kill(pid: int, proven: Callable[[], bool]) -> bool:
    """The number is looked at behind a handle of the process: it cannot pass on between the look and the signal."""
    if pid <= 1 or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return False
    with contextlib.suppress(OSError, OverflowError):
        handle = os.pidfd_open(pid)
        try:
            if proven():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return True
        finally:
            os.close(handle)
    return False


def _command_line(pid: int) -> list[bytes]:
    return _of_proc(pid, "cmdline").removesuffix(b"\0").split(b"\0")


def _of_proc(pid: int, name: str) -> bytes:
    """A file of /proc about a process; empty where there is no such process, or no /proc."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
