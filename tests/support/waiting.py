"""Waiting for a condition: as long as something still happens, on a machine of any speed."""

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import psutil

T = TypeVar("T")
# limit of a wait that a passing test never reaches
LONG_S = 120.0
IDLE_S = 60.0
MOST_S = 900.0
LOOK_S = 5.0


class Process(Protocol):
    """A `subprocess.Popen`, or what acts like it."""

    pid: int

    def poll(self) -> int | None: ...


def until(condition: Callable[[], T], process: Process | None = None, *, shown: Callable[[], Any] = lambda: "") -> T:
    """Wait until `condition` returns a true value, and return it.

    Without a process it gives up after two minutes.

    Args:
        process: what the condition waits for. It gives up when this process has ended, when it and its children have
            used no CPU time and written nothing for a minute, and in any case after 15 minutes.
        shown: text for the message of a failure.

    Raises:
        AssertionError: it gave up.
    """
    began = changed_at = looked_at = time.monotonic()
    before = None
    while True:
        ended = process is not None and process.poll() is not None
        # after the process has been asked: its last act may have made the condition true
        if value := condition():
            return value
        assert not ended, f"the process has ended with exit code {process.poll()}\n{shown()}"
        now = time.monotonic()
        if process is not None and now - looked_at >= LOOK_S:
            looked_at, work = now, _work(process.pid)
            if work != before:
                before, changed_at = work, now
        limit = LONG_S if process is None else MOST_S
        assert now - began < limit, f"not true after {limit:.0f} s\n{shown()}"
        assert process is None or now - changed_at < IDLE_S, (
            f"the process has done nothing for {IDLE_S:.0f} s\n{shown()}"
        )
        time.sleep(0.01)


def _work(pid: int) -> set[tuple[int, float, int]]:
    """What a process and its children have done so far: of each its ID, CPU seconds and characters written."""
    work = set()
    try:
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            times, characters = process.cpu_times(), process.io_counters().write_chars
            work.add((process.pid, times.user + times.system, characters))
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        # one of them has just ended, and that is something
        work.add((0, time.monotonic(), 0))
    return work
