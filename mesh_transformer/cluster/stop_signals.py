"""Ctrl-C and SIGTERM to the driver."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from mesh_transformer.logs import log


class StopSignals:
    """While active, the first signal is noted, for the workers to save; a second Ctrl-C ends the driver at once."""

    def __init__(self) -> None:
        self.noted: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)
        }
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.default_int_handler)
        if self.noted is None:
            log.warning("%s: the workers save after this step, then all ends", signal.Signals(number).name)
        self.noted = number
