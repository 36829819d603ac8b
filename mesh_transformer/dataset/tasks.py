"""Runs tasks: in this process, or on a Ray cluster.

Of this package, only this module, cluster/backends/ray_cluster.py and ray_join.py import Ray.

A task is a function of a module of this package, and its result is small. It writes objects that appear whole, and are
equal whoever writes them. So a task may run twice at once: it starts again after the death of its worker or node, and a
task on a worker that has stopped gets a duplicate. A task that ends its worker each time ends the job.
"""

import contextlib
import functools
import logging
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from mesh_transformer import ray_join
from mesh_transformer.dataset.worker import AGAIN, Task, call, program_version
from mesh_transformer.errors import RunError, UserError, plural
from mesh_transformer.logs import log
from mesh_transformer.ray_join import first_line

# if no task has ended for this time and for _LONG times the longest task, each open task gets a duplicate
_IDLE_S = 30.0
_LONG = 2.0
# the limit before the first task has ended, in _IDLE_S
_FIRST = 4.0
# a task waits in Ray for each this many cores, so that a core never waits for the driver
_WAITING = 2
_OBJECT_STORE_BYTES = 100_000_000
# deaths of workers after which a task ends the job; deaths of nodes do not count
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


class OnRay:
    """Runs tasks on the cluster at an address, or on a new one of this machine, which ends with the context.

    Args:
        address: of a cluster; None: a new cluster.
        workers: tasks at once on the new cluster.

    Raises:
        UserError: no cluster answers at the address.
    """

    def __init__(self, address: str | None, workers: int = 1):
        self._address, self._workers = address, workers
        self._joined = False

    def __enter__(self) -> "OnRay":
        return self

    def __exit__(self, *_: object) -> None:
        if self._joined:
            import ray

            ray.shutdown()

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        if not tasks:
            return
        self._join()
        waiting, calls = deque(range(len(tasks))), _Calls(tasks)
        longest = 0.0
        ended, limit = time.monotonic(), _FIRST * _IDLE_S
        while waiting or calls.open:
            while waiting and calls.open < self._most():
                calls.start(waiting.popleft())
            for number, seconds, result in calls.ended():
                longest = max(longest, seconds)
                limit = max(_IDLE_S, _LONG * longest)
                ended = time.monotonic()
                yield number, result
            if time.monotonic() - ended > limit:
                calls.repeat(limit)
                ended = time.monotonic()

    def _join(self) -> None:
        """Join the cluster, or start one."""
        if self._joined:
            return
        # Ray replaces the handler of SIGTERM
        handler = signal.getsignal(signal.SIGTERM)
        try:
            if self._address is None:
                self._start()
            else:
                ray_join.join(self._address)
        finally:
            signal.signal(signal.SIGTERM, handler)
        self._joined = True
        self._cores: tuple[float, int] = (-1.0, 1)

    def _start(self) -> None:
        """Start a cluster on this machine. Another user's cluster on it is not joined.

        Ray gives its first process 30 s, which are too few on a busy machine: a second try finds its files in memory.

        Raises:
            UserError: Ray did not start twice.
        """
        import ray

        sizes: dict[str, Any] = {"num_cpus": self._workers, "object_store_memory": _OBJECT_STORE_BYTES}
        # Ray logs several lines about a machine that is too slow
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        for last in (False, True):
            try:
                ray.init(address="local", include_dashboard=False, **sizes, **quiet)
                return
            # among them are plain Exceptions
            except Exception as error:  # noqa: BLE001
                ray.shutdown()
                said = first_line(error).rstrip(".")
                if last:
                    raise UserError(
                        f"Ray does not start on this machine: {said}. Use --workers 1, which needs no Ray"
                    ) from error
                log.warning("Ray did not start: %s. It starts a second time", said)

    def _most(self) -> int:
        """How many tasks may be open. Nodes may join at any time."""
        import ray

        at, cores = self._cores
        if time.monotonic() - at > 2.0:
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
            self._cores = (time.monotonic(), cores)
        return _WAITING * cores


class _Calls:
    """The open tasks. A task has a second call if its first one seems to have stopped."""

    def __init__(self, tasks: Sequence[Task]):
        self._tasks = tasks
        # the calls of each open task, and the task of each call
        self._calls: dict[int, list[Any]] = {}
        self._numbers: dict[Any, int] = {}
        self._deaths: Counter[int] = Counter()
        # tasks whose worker has taken too much memory
        self._later: list[int] = []

    @property
    def open(self) -> int:
        return len(self._calls) + len(self._later)

    def start(self, number: int, **options: Any) -> None:
        """Start a task, or a second call of it."""
        import ray

        task = ray.cloudpickle.dumps((os.getcwd(), self._tasks[number]))
        reference = _remote().options(**options).remote(program_version(), task)
        self._calls.setdefault(number, []).append(reference)
        self._numbers[reference] = number

    def ended(self) -> Iterator[tuple[int, float, Any]]:
        """Number, seconds and result of each task that has ended within a second.

        Raises:
            UserError, RunError: as `Runner.run`.
        """
        import ray

        if not self._calls:
            self._start_later()
        ready, _ = ray.wait(list(self._numbers), timeout=1.0)
        for reference in ready:
            number = self._numbers.pop(reference, None)
            # its duplicate was faster
            if number is None:
                continue
            outcome = _result(reference)
            if isinstance(outcome, Exception):
                self._lose(number, reference, outcome)
                continue
            for other in self._calls.pop(number):
                if self._numbers.pop(other, None) is not None:
                    ray.cancel(other, force=False)
            self._start_later()
            yield number, *outcome

    def repeat(self, seconds: float) -> None:
        """Start each task a second time: nothing has ended for `seconds`."""
        import ray

        alone = [number for number, started in self._calls.items() if len(started) == 1]
        if not ray.cluster_resources().get("CPU"):
            log.warning("the Ray cluster has no CPU cores: the job waits until a node joins")
        elif alone:
            many = plural(len(alone), "task is", "tasks are")
            log.info("nothing has ended for %.0f s: %s started a second time", seconds, many)
            for number in alone:
                self.start(number, scheduling_strategy="SPREAD")

    def _lose(self, number: int, reference: Any, error: Exception) -> None:
        """A call has lost its worker or node. The task starts again if it has no other call.

        Raises:
            RunError: the task has lost MOST_DEATHS workers.
        """
        from ray.exceptions import OutOfMemoryError, WorkerCrashedError

        about = self._tasks[number].about
        if isinstance(error, (OutOfMemoryError, WorkerCrashedError)):
            self._deaths[number] += 1
            if self._deaths[number] >= MOST_DEATHS:
                full = isinstance(error, OutOfMemoryError)
                raise RunError(
                    f"{about}: {MOST_DEATHS} workers have died of this task, the last one because "
                    f"{'the memory of its node is full' if full else 'its process has crashed or was killed'}: give "
                    f"the nodes more memory or fewer tasks at once, or leave the file out if it is damaged; {AGAIN}"
                )
        log.debug("%s: the task starts again: %s", about, first_line(error))
        self._calls[number].remove(reference)
        if not self._calls[number]:
            del self._calls[number]
            if isinstance(error, OutOfMemoryError):
                self._later.append(number)
            else:
                self.start(number)

    def _start_later(self) -> None:
        """Start the tasks that wait for the memory of other tasks."""
        while self._later:
            self.start(self._later.pop())


@functools.cache
def _remote() -> Any:
    import ray

    # Ray sends this function itself, not its name, because a node may not have this package
    def call_in(version: str, content: bytes) -> Any:
        import platform

        try:
            import ray

            from mesh_transformer.dataset import worker
        except ImportError as error:
            answer: Any = f"not this program ({error})"
        else:
            answer = worker.call_sent(version, content, ray.cloudpickle.loads)
        return f"the Ray node {platform.node()} has {answer}" if isinstance(answer, str) else answer

    return ray.remote(num_cpus=1, max_retries=0)(call_in)


def _result(reference: Any) -> Any:
    """The seconds and the result of a call, or the error by which it was lost."""
    import ray
    from ray.exceptions import (
        NodeDiedError,
        ObjectLostError,
        OutOfMemoryError,
        RayError,
        RayTaskError,
        WorkerCrashedError,
    )

    try:
        answer = ray.get(reference)
    except (NodeDiedError, ObjectLostError, OutOfMemoryError, WorkerCrashedError) as error:
        return error
    except RayTaskError as error:
        if isinstance(error.cause, (UserError, RunError)):
            raise error.cause from None
        raise
    except RayError as error:
        raise RunError(f"the Ray cluster has failed: {first_line(error)}; {AGAIN}") from error
    if isinstance(answer, str):
        raise UserError(f"{answer}: install the program of this node on all nodes, in the same version")
    return answer


@contextlib.contextmanager
def runner(address: str | None, workers: int) -> Iterator[Runner]:
    """Runs tasks on the Ray cluster at an address, on this machine in several processes, or in this process."""
    if address is None and workers == 1:
        yield InProcess()
        return
    with OnRay(address, workers) as cluster:
        yield cluster
