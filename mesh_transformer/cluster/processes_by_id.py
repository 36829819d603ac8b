"""Ending processes of this program that do not answer. A number may have passed on to a stranger, who is left alone."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

WORKER = b"mesh_transformer.cluster.worker"  # in the command line
AGENT = b"ray::Agent"


class Process(NamedTuple):
    """One process of a host, and no later one of the same number.

    Args:
        started: when it did, in clock ticks since the host's start.
    """

    pid: int
    started: int


def identify(pid: int) -> Process | None:
    """The process that has this number now; None if there is none, or the system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return Process(pid, int(file.read().rpartition(b")")[2].split()[19]))
    except (FileNotFoundError, ProcessLookupError):
        return None


def kill(processes: Sequence[Process]) -> list[int]:
    """SIGKILL to those of these processes that are still there, and are workers or agents. Returns their numbers."""

    return [process.pid for process in processes if _kill(process.pid, partial(_is_ours, process))]


def kill_worker(pid: int, name: str) -> bool:
    """SIGKILL to a process if it is the worker `name` (`host_lock.worker_name`). Returns whether it was sent."""
    return _kill(pid, lambda: _command_line(pid)[-3::2] == [WORKER, name.encode()])


def _is_ours(process: Process) -> bool:
    line = b"\0".join(_command_line(process.pid))
    return identify(process.pid) == process and (WORKER in line or AGENT in line)


def _kill(pid: int, proven: Callable[[], bool]) -> bool:
    """The number is looked at behind a handle of the process: it cannot pass on between the look and the signal."""
    if pid <= 1 or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return False
    try:
        handle = os.pidfd_open(pid)
    except (OSError, OverflowError):
        return False
    try:
        if not proven():
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)


def _command_line(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().removesuffix(b"\0").split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
