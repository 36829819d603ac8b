"""Training batches that the driver reads and streams to the workers.

A worker may take batch n when all workers are known to hold batch n + RESERVED_BATCHES. So after the driver's death
every worker can reach the step at which all agree to save. JAX chooses the step after the newest one that any worker
has begun, once all processes have the notice, which takes a second or two. In that time a worker takes one of the last
batches in RELEASE_S seconds, so that no worker gets ahead.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np

from mesh_transformer.config import Config
from mesh_transformer.sequences import Sequences

# limit for the batches that a worker holds
BUFFER_BATCHES = 8
# the last batches, which a worker may not take while the driver lives
RESERVED_BATCHES = 4
RELEASE_S = 3.0
# time for the driver's thread to end; longer than a call with a batch
STOP_TIMEOUT_S = 6.0


def may_take(sent: int, taken: int) -> bool:
    """Whether a worker may take another batch, after `taken` of the `sent` batches.

    All workers are known to hold the batches before the last one sent.
    """
    return taken + RESERVED_BATCHES <= sent - 2


class StreamedFeed:
    """The worker's end of a stream: a `Loader` of the batches that arrive.

    Args:
        send: sends an event to the agent: first the request, then one for each batch taken.
        rows: the sequences of a microbatch that this worker needs.
        microbatch: the number of sequences of a microbatch.
    """

    def __init__(self, send: Callable[[dict[str, Any]], None], rows: Sequence[int], microbatch: int):
        self._send, self._rows, self._microbatch = send, rows, microbatch
        self._batches: dict[int, tuple[Sequences, Any]] = {}
        self._taken, self._held_by_all = 0, -1
        # when the end of the run was announced
        self._drain_began: float | None = None
        self._state: Any = None
        self._requested = False
        self._changed = threading.Condition()

    def __next__(self) -> Sequences:
        if not self._requested:
            self._requested = True
            request = {"rows": list(self._rows), "microbatch": self._microbatch, "state": self._state}
            self._send({"kind": "feed", **request})
        number = self._taken
        with self._changed:
            while not self._may_take(number):
                self._changed.wait(None if self._drain_began is None else 0.1)
            batch, state = self._batches.pop(number)
        if not len(batch.tokens):
            raise StopIteration
        self._state = state
        self._taken += 1
        self._send({"kind": "taken", "count": self._taken})
        return batch

    def __iter__(self) -> StreamedFeed:
        return self

    def get_state(self) -> dict[str, Any]:
        """The position of the driver's loader after the last batch taken."""
        return self._state

    def set_state(self, state: dict[str, Any]) -> None:
        """Request the batches after this position. Allowed before the first batch only."""
        if self._requested:
            raise RuntimeError("the driver streams from the first position requested")
        self._state = state

    def close(self) -> None:
        """Does nothing: no file is open."""

    def put(self, number: int, batch: Sequences, state: Any, held_by_all: int) -> None:
        """Add a batch that has arrived, from any thread. All workers hold the batches up to `held_by_all`."""
        with self._changed:
            self._batches[number] = (batch, state)
            self._held_by_all = max(self._held_by_all, held_by_all)
            self._changed.notify_all()

    def drain(self) -> None:
        """Release the reserved batches slowly, because the run is about to end, perhaps after the driver's death."""
        with self._changed:
            self._drain_began = self._drain_began or time.monotonic()
            self._changed.notify_all()

    def _may_take(self, number: int) -> bool:
        released = 0 if self._drain_began is None else int((time.monotonic() - self._drain_began) / RELEASE_S)
        return number in self._batches and number + RESERVED_BATCHES <= self._held_by_all + released


class Streamer:
    """The driver's end of a stream: a thread that reads batches and sends them to the workers.

    Args:
        feed: sends a batch to all workers (`AgentCluster.feed`).
        requests: the event `feed` of each worker.
        tune_model_path: the checkpoint that the run starts from, which may have the tokenizer.
    """

    def __init__(
        self,
        feed: Callable[..., bool],
        config: Config,
        requests: Sequence[dict[str, Any]],
        tune_model_path: str | None = None,
    ):
        self._feed, self._config, self._tune_model_path = feed, config, tune_model_path
        self._microbatch, self._state = requests[0]["microbatch"], requests[0]["state"]
        self._rows = [event["rows"] for event in requests]
        self._stopped = threading.Event()
        # the exception that ended the thread
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="streamer", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Afterwards it sends at most the batch whose reader or agent does not answer."""
        self._stopped.set()
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        from mesh_transformer.runtime.session.tokenizer import with_run_tokenizer
        from mesh_transformer.runtime.training.feeds import read_train_set

        try:
            config, tokenizer_files = with_run_tokenizer(self._config, self._tune_model_path)
            tokenizer = config.data.tokenizer or tokenizer_files
            reader = read_train_set(config, self._microbatch, range(self._microbatch), tokenizer)
            with contextlib.closing(reader) as loader:
                if self._state is not None:
                    loader.set_state(self._state)
                self._stream(loader)
        except Exception as error:  # noqa: BLE001  (the driver's main thread raises it)
            self.error = error

    def _stream(self, loader: Any) -> None:
        # the end of the data: batches without a microbatch, so many that the workers may take all batches before them
        empty = Sequences(np.zeros((0, self._microbatch, 0), np.int32))
        for number, batch in enumerate(chain(loader, repeat(empty, RESERVED_BATCHES + 2))):
            while not self._stopped.is_set() and not self._feed(
                number, batch, self._rows, loader.get_state(), number - 1
            ):
                self._stopped.wait(0.05)
            if self._stopped.is_set():
                return
