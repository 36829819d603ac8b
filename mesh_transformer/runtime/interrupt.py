"""SIGTERM (a preemption notice) and Ctrl-C, turned into "save after this step, then leave"."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils

from mesh_transformer.logs import log


class Interrupt:
    """While active, SIGTERM and Ctrl-C ask the run to stop instead of ending the process.

    In a job of several processes any one's SIGTERM stops all of them, after the same step: JAX's coordination
    service agrees on it. A second Ctrl-C ends a single process at once; schedulers repeat SIGTERM, so that does not.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Interrupt:
        if jax.process_count() == 1:
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
        if self._signal is None:
            again = "; once more to stop at once" if number == signal.SIGINT else ""
            log.warning("%s: saving after this step%s", signal.Signals(number).name, again)
        self._signal = number

    @property
    def noted(self) -> bool:
        """Whether this process was asked to stop. Processes may differ: use `exit_code` to act on it together."""
        return self._signal is not None

    def exit_code(self, step: int) -> int | None:
        """128 + the signal if the run must save after `step` and leave, else None. Call at every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self._signal = signal.SIGTERM
        return None if self._signal is None else 128 + self._signal
