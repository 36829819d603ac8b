"""Runs tasks: in this process, or on a Ray cluster.

Of this package, only this module, cluster/backends/ray_cluster.py and ray_join.py import Ray.

A task is a function of a module of this package, and its result is small. It writes objects that appear whole, and are
equal whoever writes them. So a task may run twice at once: after the death of a worker or a node Ray starts it again,
and a task on a worker that has stopped gets a duplicate.
"""

import contextlib
import functools
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from mesh_transformer import ray_join
from mesh_transformer.errors import RunError, UserError, is_disk_full, plural
from mesh_transformer.logs import log
from mesh_transformer.ray_join import first_line

# if no task has ended for this time and for _LONG times the longest task, each open task gets a duplicate
IDLE_S = 30.0
_LONG = 2.0
# the same time before the first end of a task, in IDLE_S
_FIRST = 4.0
# a task waits in Ray for each this many cores, so that a core never waits for the driver
_WAITING = 2
_OBJECT_STORE_BYTES = 100_000_000


class Task(NamedTuple):
    """A call of `function` with `arguments`."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


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


def call(task: Task) -> Any:
    """The result of a task."""
    with failures_explained():
        return task.function(*task.arguments)


@contextlib.contextmanager
def failures_explained() -> Iterator[None]:
    """Failures of the disk and of a bucket become errors of one line."""
    try:
        yield
    except (UserError, RunError):
        raise
    except Exception as error:
        if is_disk_full(error):
            raise RunError(f"the disk is full ({first_line(error)}): free some space, and {_AGAIN}") from error
        if isinstance(error, (OSError, EOFError)) or _of_bucket(error):
            raise RunError(f"{first_line(error)}: correct it, and {_AGAIN}") from error
        raise


_AGAIN = "give the same command again: it goes on with the parts that are finished"


class OnRay:
    """Runs tasks on the cluster at an address, or on a new one of this machine, which ends with the context.

    Args:
        address: of a cluster; None: a new cluster.
        workers: tasks at once on the new cluster.
        idle_s: least time without the end of a task after which open tasks get a duplicate.

    Raises:
        UserError: no cluster answers at the address.
    """

    def __init__(self, address: str | None, workers: int = 1, idle_s: float = IDLE_S):
        self._address, self._workers, self._idle_s = address, workers, idle_s
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
        import ray

        self._join()
        waiting = deque(range(len(tasks)))
        # the calls of each open task, and the task of each call
        calls: dict[int, list[Any]] = {}
        numbers: dict[Any, int] = {}
        longest = 0.0

        def start(number: int, **options: Any) -> None:
            reference = _remote().options(**options).remote(os.getcwd(), tasks[number])
            calls.setdefault(number, []).append(reference)
            numbers[reference] = number

        ended, limit = time.monotonic(), _FIRST * self._idle_s
        while waiting or calls:
            while waiting and len(calls) < self._most():
                start(waiting.popleft())
            ready, _ = ray.wait(list(numbers), timeout=1.0)
            for reference in ready:
                number = numbers.pop(reference, None)
                # its duplicate was faster
                if number is None:
                    continue
                seconds, result = _result(reference)
                longest = max(longest, seconds)
                limit = max(self._idle_s, _LONG * longest)
                for other in calls.pop(number):
                    if numbers.pop(other, None) is not None:
                        ray.cancel(other, force=False)
                ended = time.monotonic()
                yield number, result
            if time.monotonic() - ended > limit:
                alone = [number for number, started in calls.items() if len(started) == 1]
                if not ray.cluster_resources().get("CPU"):
                    log.warning("the Ray cluster has no CPU cores: the job waits until a node joins")
                elif alone:
                    many = plural(len(alone), "task is", "tasks are")
                    log.info("nothing has ended for %.0f s: %s started a second time", limit, many)
                    for number in alone:
                        start(number, scheduling_strategy="SPREAD")
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
        """Start a cluster on this machine. Another user's cluster on it is not joined."""
        import ray

        sizes: dict[str, Any] = {"num_cpus": self._workers, "object_store_memory": _OBJECT_STORE_BYTES}
        try:
            # Ray logs several lines about a machine that is too slow
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
            ray.init(address="local", include_dashboard=False, **sizes, **quiet)
        # among them are plain Exceptions
        except Exception as error:  # noqa: BLE001
            said = first_line(error).rstrip(".")
            raise UserError(
                f"Ray does not start on this machine: {said}. Use --workers 1, which needs no Ray"
            ) from error

    def _most(self) -> int:
        """How many tasks may be open. Nodes may join at any time."""
        import ray

        at, cores = self._cores
        if time.monotonic() - at > 2.0:
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
            self._cores = (time.monotonic(), cores)
        return _WAITING * cores


def call_in(folder: str, task: Task) -> tuple[float, Any]:
    """The seconds and the result of a task on a worker. Relative paths are relative to the driver's folder, if the node
    has it."""
    with contextlib.suppress(OSError):
        os.chdir(folder)
    began = time.monotonic()
    result = call(task)
    return time.monotonic() - began, result


@functools.cache
def _remote() -> Any:
    import ray

    return ray.remote(num_cpus=1, max_retries=-1)(call_in)


def _result(reference: Any) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        if isinstance(error.cause, (UserError, RunError)):
            raise error.cause from None
        raise
    except RayError as error:
        raise RunError(f"the Ray cluster has failed: {first_line(error)}; {_AGAIN}") from error


def _of_bucket(error: Exception) -> bool:
    """Whether a bucket has refused a request, or has not answered."""
    with contextlib.suppress(ImportError):
        from google.api_core.exceptions import GoogleAPICallError, RetryError
        from requests.exceptions import RequestException

        return isinstance(error, (GoogleAPICallError, RetryError, RequestException))
    return False


@contextlib.contextmanager
def runner(address: str | None, workers: int) -> Iterator[Runner]:
    """Runs tasks on the Ray cluster at an address, on this machine in several processes, or in this process."""
    if address is None and workers == 1:
        yield InProcess()
        return
    with OnRay(address, workers) as cluster:
        yield cluster
