"""Runs tasks: in this process, in processes of this machine, or on a Ray cluster.

A task is a function of a module of this package, and its result is small. It writes objects that appear whole, and are
equal whoever writes them. So a task may run twice at once: it starts again after the death of its process or node, and
a task whose process has stopped gets a duplicate. A task that ends its process each time ends the job.
"""

import contextlib
import time
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Protocol

from mesh_transformer.dataset.pool import Lost, Pool
from mesh_transformer.dataset.worker import AGAIN, Task, call
from mesh_transformer.errors import RunError, plural
from mesh_transformer.logs import log

# if no task has ended for this time and for _LONG times the longest task, each open task gets a duplicate
_IDLE_S = 30.0
_LONG = 2.0
# the limit before the first task has ended, in _IDLE_S
_FIRST = 4.0
# deaths of processes after which a task ends the job; deaths of nodes do not count
MOST_DEATHS = 5


class Runner(Protocol):
    """Runs tasks."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        """The numbers and results of the tasks, as they end.

        Raises:
            UserError, RunError: a task has raised it; or the cluster cannot run tasks.
        """


class InProcess:
    """Runs one task after the other in this process."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        for number, task in enumerate(tasks):
            yield number, call(task)


class OnPool:
    """Runs tasks on the processes of a pool."""

    def __init__(self, pool: Pool):
        self._pool = pool

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        waiting, calls = deque(range(len(tasks))), _Calls(tasks, self._pool)
        longest = 0.0
        ended_at, limit = time.monotonic(), _FIRST * _IDLE_S
        while waiting or calls.open:
            while waiting and calls.open < max(1, self._pool.capacity()):
                calls.start(waiting.popleft())
            for number, seconds, result in calls.ended():
                longest = max(longest, seconds)
                limit = max(_IDLE_S, _LONG * longest)
                ended_at = time.monotonic()
                yield number, result
            if time.monotonic() - ended_at > limit:
                calls.repeat(limit)
                ended_at = time.monotonic()


class _Calls:
    """The open tasks. A task has a second call if its first one seems to have stopped."""

    def __init__(self, tasks: Sequence[Task], pool: Pool):
        self._tasks, self._pool = tasks, pool
        # the calls of each open task, and the task of each call
        self._calls: dict[int, list[Hashable]] = {}
        self._numbers: dict[Hashable, int] = {}
        self._deaths: Counter[int] = Counter()
        # tasks whose process has taken too much memory
        self._later: list[int] = []

    @property
    def open(self) -> int:
        return len(self._calls) + len(self._later)

    def start(self, number: int, *, duplicate: bool = False) -> None:
        """Start a task, or a second call of it."""
        started = self._pool.start(self._tasks[number], duplicate=duplicate)
        self._calls.setdefault(number, []).append(started)
        self._numbers[started] = number

    def ended(self) -> Iterator[tuple[int, float, Any]]:
        """Number, seconds and result of each task that has ended within a second.

        Raises:
            UserError, RunError: as `Runner.run`.
        """
        if not self._calls:
            self._start_later()
        for ended in self._pool.ended(list(self._numbers)):
            number = self._numbers.pop(ended, None)
            # its duplicate was faster
            if number is None:
                continue
            outcome = self._pool.outcome(ended)
            if isinstance(outcome, Lost):
                self._lose(number, ended, outcome)
                continue
            for other in self._calls.pop(number):
                if self._numbers.pop(other, None) is not None:
                    self._pool.cancel(other)
            self._start_later()
            yield number, *outcome

    def repeat(self, seconds: float) -> None:
        """Start each task a second time: nothing has ended for `seconds`."""
        alone = [number for number, started in self._calls.items() if len(started) == 1]
        if not self._pool.capacity():
            log.warning("the Ray cluster has no CPU cores: the job waits until a node joins")
        elif alone:
            many = plural(len(alone), "task is", "tasks are")
            log.info("nothing has ended for %.0f s: %s started a second time", seconds, many)
            for number in alone:
                self.start(number, duplicate=True)

    def _lose(self, number: int, ended: Hashable, lost: Lost) -> None:
        """A call has lost its process or node. The task starts again if it has no other call.

        Raises:
            RunError: the task has lost MOST_DEATHS processes.
        """
        about = self._tasks[number].about
        if lost.by_task:
            self._deaths[number] += 1
            if self._deaths[number] >= MOST_DEATHS:
                raise RunError(
                    f"{about}: {MOST_DEATHS} workers have died of this task, the last one because {lost.reason}: "
                    f"{self._pool.advice}, or leave the file out if it is damaged; {AGAIN}"
                )
        log.debug("%s: the task starts again: %s", about, lost.reason)
        self._calls[number].remove(ended)
        if not self._calls[number]:
            del self._calls[number]
            if lost.memory:
                self._later.append(number)
            else:
                self.start(number)

    def _start_later(self) -> None:
        """Start the tasks that wait for the memory of other tasks."""
        while self._later:
            self.start(self._later.pop())


@contextlib.contextmanager
def runner(address: str | None, workers: int) -> Iterator[Runner]:
    """Runs tasks on the Ray cluster at an address, in processes of this machine, or in this process."""
    if address is not None:
        from mesh_transformer.dataset.ray_pool import RayPool

        with RayPool(address) as cluster:
            yield OnPool(cluster)
    elif workers > 1:
        from mesh_transformer.dataset.process_pool import ProcessPool

        with ProcessPool(workers) as processes:
            yield OnPool(processes)
    else:
        yield InProcess()
