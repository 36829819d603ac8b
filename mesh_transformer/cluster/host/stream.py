"""Training batches that the driver reads and streams to the workers.

A worker may take batch n once all are known to hold batch n + MARGIN. So when the driver dies, every worker can still reach
the step at which they agree to save: JAX takes the one after the newest that any has begun, once the notice has gone round,
which takes it a second or two. Until then nobody runs ahead: the last batches are given out one in RELEASE_S seconds.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mesh_transformer.config import Config

DEPTH = 8  # batches that a worker holds at most
MARGIN = 4  # those that it may not take yet
RELEASE_S = 3.0
END_S = 6.0  # for the driver's thread to end: longer than a batch is offered for


def may_take(given: int, taken: int) -> bool:
    """Whether a worker that has taken so many of the batches given to it has another one that it may take.

    All are known to hold those before the last one given.
    """
    return taken + MARGIN <= given - 2


class StreamedFeed:
    """A worker's end: a `Loader` of what comes in.

    Args:
        tell: sends an event to the agent: first what is needed, then each batch taken.
        rows, microbatch: the sequences of a microbatch that this worker needs, and how many there are.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], rows: Sequence[int], microbatch: int):
        self._tell, self._rows, self._microbatch = tell, rows, microbatch
        self._batches: dict[int, tuple[np.ndarray, Any]] = {}
        self._taken, self._held = 0, -1
        self._left: float | None = None  # when the run was told to end
        self._state: Any = None
        self._asked = False
        self._changed = threading.Condition()

    def __next__(self) -> np.ndarray:
        if not self._asked:
            self._asked = True
            needed = {"rows": list(self._rows), "microbatch": self._microbatch, "state": self._state}
            self._tell({"kind": "feed", **needed})
        number = self._taken
        with self._changed:
            while not self._may_take(number):
                self._changed.wait(None if self._left is None else 0.1)
            batch, self._state = self._batches.pop(number)
        self._taken += 1
        self._tell({"kind": "taken", "count": self._taken})
        return batch

    def __iter__(self) -> StreamedFeed:
        return self

    def get_state(self) -> dict[str, Any]:
        """The position of the driver's loader behind the last batch taken."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Ask for the batches behind this position. Only before the first one."""
        if self._asked:
            raise RuntimeError("the driver streams from the first position asked for")
        self._state = state

    def close(self) -> None:
        """Nothing is open."""

    def put(self, number: int, batch: np.ndarray, state: Any, held: int) -> None:
        """A batch has come, from any thread; all workers hold the batches up to `held`."""
        with self._changed:
            self._batches[number] = (batch, state)
            self._held = max(self._held, held)
            self._changed.notify_all()

    def leave(self) -> None:
        """The run is to end, perhaps because nobody streams any more."""
        with self._changed:
            self._left = self._left or time.monotonic()
            self._changed.notify_all()

    def _may_take(self, number: int) -> bool:
        released = 0 if self._left is None else int((time.monotonic() - self._left) / RELEASE_S)
        return number in self._batches and number + MARGIN <= self._held + released


class Streamer:
    """The driver's end: a thread that reads batches and gives them to the workers until it is stopped."""

    def __init__(self, feed: Callable[..., bool], config: Config, wanted: Sequence[dict[str, Any]]):
        """`feed` is the cluster's (`AgentCluster.feed`); `wanted` holds the event `feed` of each worker."""
        self._feed, self._config = feed, config
        self._microbatch, self._state = wanted[0]["microbatch"], wanted[0]["state"]
        self._rows = [event["rows"] for event in wanted]
        self._stopped = threading.Event()
        self.error: BaseException | None = None  # what ended it early
        self._thread = threading.Thread(target=self._run, name="streamer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End: nothing is offered to the cluster any more, but for a batch whose reader or agent does not answer."""
        self._stopped.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        from mesh_transformer.runtime.training.feeds import read_train_set

        try:
            whole = range(self._microbatch)
            with contextlib.closing(read_train_set(self._config, self._microbatch, whole)) as loader:
                if self._state is not None:
                    loader.set_state(self._state)
                self._stream(loader)
        except Exception as error:  # noqa: BLE001  (the driver's main thread raises it)
            self.error = error

    def _stream(self, loader: Any) -> None:
        number = 0
        while not self._stopped.is_set():
            batch, state = next(loader), loader.get_state()
            while not self._feed(number, batch, self._rows, state, number - 1):
                if self._stopped.wait(0.05):
                    return
            number += 1
