"""SIGTERM (a preemption notice) and Ctrl-C as a note for a loop that saves first."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

from mesh_transformer.logs import log


class StopSignals:
    """While active, the first signal is noted and `told` is logged. A second Ctrl-C ends the process at once; schedulers repeat
    SIGTERM, so that does not.
    """

    def __init__(self, told: str = "the workers save after this step, then all ends"):
        self.noted: int | None = None
        self._told = told
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
            signal.signal(number, signal.SIG_DFL)
        if self.noted is None:
            again = "; once more to stop at once" if number == signal.SIGINT else ""
            log.warning("%s: %s%s", signal.Signals(number).name, self._told, again)
        self.noted = number
