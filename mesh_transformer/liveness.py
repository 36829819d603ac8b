"""Tells whether this process makes progress, so that the driver's watchdog can tell a long wait from a hang.

A process that compiles, reads, writes or computes uses CPU time; a process that hangs uses nearly none. Two activities
look like a hang and are recorded here: work on a device, and calls to other services, which may be retried for a while.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# cores in use that count as work; measured: 0.003 for a worker whose threads all wait, with JAX's heartbeats and gloo
MIN_CORES = 0.02
# the average of the cores in use is over this time
WINDOW_S = 3.0
# a longer service call does not count as progress; `files` retries a call for 120 s
SERVICE_S = 150.0

_numbers = itertools.count(1)
# the number of the newest record of progress
_last = 0
# the service calls in progress: number to start time
_calls: dict[int, float] = {}


def record_progress() -> None:
    """Tell the watchdog that work has finished, on a device or elsewhere."""
    global _last
    _last = next(_numbers)


@contextlib.contextmanager
def service_call() -> Iterator[None]:
    """Marks a call to a service, such as a bucket, that may take long to answer. The call must have its own time
    limit."""
    call = next(_numbers)
    _calls[call] = time.monotonic()
    try:
        yield
    finally:
        del _calls[call]
        record_progress()


class Watch:
    """Checks this process for progress at intervals.

    Args:
        clock, cpu: returns elapsed seconds, and the CPU seconds of all threads of the process.
        disk: returns whether a thread waits for a disk.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
        disk: Callable[[], bool] | None = None,
    ):
        self._clock, self._cpu, self._disk = clock, cpu, disk or _waits_for_disk
        self._began, self._used, self._seen = clock(), cpu(), _last

    def at_work(self) -> bool:
        """Whether the process has made progress since the last call. Use of CPU time shows after at most WINDOW_S."""
        now = self._clock()
        if self._seen != _last or any(now - began < SERVICE_S for began in list(_calls.values())):
            self._seen = _last
            return True
        if (passed := now - self._began) < WINDOW_S:
            return False
        used, before = self._cpu(), self._used
        self._began, self._used = now, used
        return used - before >= MIN_CORES * passed or self._disk()


def _waits_for_disk() -> bool:
    """Whether a thread is in an uninterruptible wait, such as a flush: a restarted process would wait too."""
    for path in Path("/proc/self/task").glob("*/stat"):
        # the thread may have ended
        with contextlib.suppress(OSError):
            if path.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False
