"""The interface of processes that run tasks: process_pool.py and ray_pool.py have one each."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mesh_transformer.dataset.worker import Task


@dataclass(frozen=True)
class Lost:
    """A call has ended without a result.

    Args:
        reason: why, for messages.
        by_task: whether the task may be the reason, and not its node.
        memory: whether other tasks may have left it too little memory.
    """

    reason: str
    by_task: bool = True
    memory: bool = False


class Pool(Protocol):
    """Processes that run calls of tasks. A call is named by a value of the pool."""

    # what helps where a task ends its process each time
    advice: str

    def capacity(self) -> int:
        """How many calls may be open. It may change at any time; 0: no processor is left."""

    def start(self, task: Task, *, duplicate: bool = False) -> Hashable:
        """Start a call. `duplicate`: the task has another call, which seems to have stopped."""

    def ended(self, calls: Sequence[Any]) -> Sequence[Any]:
        """Those of the calls that have ended, after at most a second."""

    def outcome(self, call: Any) -> tuple[float, Any] | Lost:
        """Seconds and result of a call that has ended.

        Raises:
            UserError, RunError: the task has raised it; or the pool cannot run tasks.
        """

    def cancel(self, call: Any) -> None:
        """End a call whose result is not needed."""
