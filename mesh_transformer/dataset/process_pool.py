"""Runs tasks in processes of this machine. They are connected by pipes: nothing listens."""

import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from mesh_transformer.dataset.pool import Lost
from mesh_transformer.dataset.worker import Task, call
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.stop_signals import TERMINATIONS

# processes begin anew: a fork would copy the locks of this process's threads
_CONTEXT = multiprocessing.get_context("spawn")
_KILLED = -9


class ProcessPool:
    """So many processes, each with one task at a time. They end with the context, and where this process dies."""

    advice = "give --workers a smaller number, so that each task has more memory"

    def __init__(self, workers: int):
        self._workers = workers
        self._processes: set[_Process] = set()
        self._idle: list[_Process] = []

    def __enter__(self) -> "ProcessPool":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end()

    def capacity(self) -> int:
        return self._workers

    def start(self, task: Task, *, duplicate: bool = False) -> "_Process":
        """A duplicate gets a process of its own, because a process that has stopped stays in its place."""
        if self._idle:
            process = self._idle.pop()
        else:
            process = _Process()
            self._processes.add(process)
        process.send(task)
        return process

    def ended(self, calls: Sequence["_Process"]) -> list["_Process"]:
        ready = set(wait([place for process in calls for place in process.places], timeout=1.0))
        return [process for process in calls if not ready.isdisjoint(process.places)]

    def outcome(self, call: "_Process") -> tuple[float, Any] | Lost:
        answer = call.answer()
        if answer is None:
            code = self._end(call)
            return Lost(f"its process has crashed or was killed ({_ending(code)})", memory=code == _KILLED)
        if len(self._processes) > self._workers:
            self._end(call)
        else:
            self._idle.append(call)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self, call: "_Process") -> None:
        self._end(call)

    def _end(self, process: "_Process") -> int:
        self._processes.discard(process)
        return process.end()


class _Process:
    """A process and the driver's end of its pipe.

    Attributes:
        places: what becomes ready when a task, or the process, has ended.
    """

    def __init__(self) -> None:
        self._connection, other = _CONTEXT.Pipe()
        # a daemon: the end of this program ends it
        self._process: SpawnProcess = _CONTEXT.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        # so that the pipe ends with the process
        other.close()
        self.places: tuple[Any, ...] = (self._connection, self._process.sentinel)

    def send(self, task: Task) -> None:
        """Give it a task."""
        # a process that has died answers with None
        with contextlib.suppress(BrokenPipeError):
            self._connection.send(task)

    def answer(self) -> tuple[float, Any] | Exception | None:
        """Seconds and result of the task, the exception that it has raised, or None: the process has died."""
        try:
            if self._connection.poll():
                answer: tuple[float, Any] | Exception = self._connection.recv()
                return answer
        except (EOFError, ConnectionResetError):
            pass
        return None

    def end(self) -> int:
        """Kill it. Returns its exit code."""
        self._process.kill()
        self._process.join()
        self._connection.close()
        return self._process.exitcode or 0


def _ending(code: int) -> str:
    """The signal or exit code by which a process has ended."""
    if code == _KILLED:
        return "SIGKILL, which Linux sends where the memory is full"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _serve(connection: Connection) -> None:
    """Run tasks until the driver closes the pipe. This is the process's main function."""
    # Ctrl-C and the end of a terminal go to all its processes; the driver ends them
    for number in {signal.SIGINT, *TERMINATIONS} - {signal.SIGTERM}:
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    logging.disable(logging.WARNING)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            connection.send(_answer(connection.recv()))


def _end_with_driver() -> None:
    """End this process when the driver has died, also during a task."""
    if (driver := multiprocessing.parent_process()) is not None:
        driver.join()
        os._exit(1)


def _answer(task: Task) -> tuple[float, Any] | Exception:
    """Seconds and result of a task, or the exception that it has raised."""
    began = time.monotonic()
    try:
        result = call(task)
        return time.monotonic() - began, result
    except UserError as error:
        return UserError(str(error))
    except RunError as error:
        return RunError(str(error))
    except Exception:  # noqa: BLE001
        # any exception: its class may not be one that can be sent
        return RuntimeError(f"in a process of this command:\n{traceback.format_exc()}")
