"""Whether this process is at work: the watchdog (`cluster/failures.py`) must tell a long wait from a hang.

A process that compiles, reads, writes or computes uses its CPUs; one that hangs uses nearly none. Two things look like a hang
and are recorded here: work on a device, and calls to other services, which may be repeated for a while.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SHARE = 0.02  # of one core: a worker of which every thread waits, with JAX's heartbeats and gloo, was seen to use 0.003
WINDOW_S = 3.0  # over which that is averaged
SERVICE_S = 150.0  # a call to a service that takes longer counts no more; `files` repeats one for 120

_numbers = itertools.count(1)
_last = 0  # the newest of them
_calls: dict[int, float] = {}  # those under way, and when each began


def record_progress() -> None:
    """Tell the watchdog that work has finished, on a device or elsewhere."""
    global _last
    _last = next(_numbers)


@contextlib.contextmanager
def service_call() -> Iterator[None]:
    """Marks a wait for a service, such as a bucket, that may not answer for a while; the wait ends by itself."""
    call = next(_numbers)
    _calls[call] = time.monotonic()
    try:
        yield
    finally:
        del _calls[call]
        record_progress()


class Watch:
    """Looks at this process now and then.

    Args:
        clock, cpu: seconds that have passed, and those that all threads of the process have computed.
        disk: whether a thread waits for a disk.
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
        """Whether there was a sign since the last look. One by CPU time is seen within WINDOW_S."""
        now = self._clock()
        if self._seen != _last or any(now - began < SERVICE_S for began in list(_calls.values())):
            self._seen = _last
            return True
        if (passed := now - self._began) < WINDOW_S:
            return False
        used, before = self._cpu(), self._used
        self._began, self._used = now, used
        return used - before >= SHARE * passed or self._disk()


def _waits_for_disk() -> bool:
    """Whether a thread is in an uninterruptible wait, as for a flush: a new process would only wait as well."""
    for path in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            if path.read_text().rpartition(")")[2].split()[0] == "D":
                return True
    return False
