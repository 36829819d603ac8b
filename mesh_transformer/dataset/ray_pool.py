"""Runs tasks on the nodes of a Ray cluster, which is its owner's: nothing is set for it."""

import functools
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from mesh_transformer import ray_join
from mesh_transformer.dataset.pool import Lost
from mesh_transformer.dataset.worker import AGAIN, Task, program_version
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.ray_join import first_line

# a task waits in Ray for each this many cores, so that a core never waits for the driver
_WAITING = 2


class RayPool:
    """The cluster at an address, from the first task to the end of the context.

    Raises:
        UserError: no cluster answers at the address.
    """

    advice = "give the nodes more memory or fewer tasks at once"

    def __init__(self, address: str):
        self._address, self._joined = address, False
        # when the cores were counted, and how many there were
        self._cores: tuple[float, int] = (float("-inf"), 0)

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *_: object) -> None:
        if self._joined:
            import ray

            ray.shutdown()

    def capacity(self) -> int:
        self._join()
        import ray

        at, cores = self._cores
        # nodes may join at any time
        if time.monotonic() - at > 2.0:
            cores = int(ray.cluster_resources().get("CPU", 0))
            self._cores = (time.monotonic(), cores)
        return _WAITING * cores

    def start(self, task: Task, *, duplicate: bool = False) -> Any:
        import ray

        content = ray.cloudpickle.dumps((os.getcwd(), task))
        options = {"scheduling_strategy": "SPREAD"} if duplicate else {}
        return _remote().options(**options).remote(program_version(), content)

    def ended(self, calls: Sequence[Any]) -> list[Any]:
        import ray

        ready, _ = ray.wait(list(calls), timeout=1.0)
        return list(ready)

    def outcome(self, call: Any) -> tuple[float, Any] | Lost:
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
            answer = ray.get(call)
        except OutOfMemoryError:
            return Lost("the memory of its node is full", memory=True)
        except WorkerCrashedError:
            return Lost("its process has crashed or was killed")
        except (NodeDiedError, ObjectLostError) as error:
            return Lost(first_line(error), by_task=False)
        except RayTaskError as error:
            if isinstance(error.cause, (UserError, RunError)):
                raise error.cause from None
            raise
        except RayError as error:
            raise RunError(f"the Ray cluster has failed: {first_line(error)}; {AGAIN}") from error
        if isinstance(answer, str):
            raise UserError(f"{answer}: install the program of this node on all nodes, in the same version")
        seconds, result = answer
        return seconds, result

    def cancel(self, call: Any) -> None:
        import ray

        ray.cancel(call, force=False)

    def _join(self) -> None:
        if self._joined:
            return
        # Ray replaces the handler of SIGTERM
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray_join.join(self._address)
        finally:
            signal.signal(signal.SIGTERM, handler)
        self._joined = True


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
