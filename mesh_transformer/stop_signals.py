"""Handles SIGTERM (a preemption notice) and Ctrl-C for a loop that saves before it stops."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from mesh_transformer.logs import log


class StopSignals:
    """While active, records a signal in `received` and logs `message` at the first one.

    A second Ctrl-C ends the process at once. A second SIGTERM does not, because schedulers repeat it.
    """

    def __init__(self, message: str = "the workers save after this step, then the run ends"):
        self.received: int | None = None
        self._message = message
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if self.received is None:
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            log.warning("%s: %s%s", signal.Signals(number).name, self._message, again)
        self.received = number
