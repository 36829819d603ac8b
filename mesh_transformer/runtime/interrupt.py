"""A request to stop a run, turned into "save after this step, then leave" in all its processes."""

from __future__ import annotations

import contextlib
import signal
from types import TracebackType

import jax
from jax.experimental import multihost_utils

from mesh_transformer.stop_signals import StopSignals


class Interrupt:
    """While active, SIGTERM and Ctrl-C ask the run to stop instead of ending the process.

    In a job of several processes any one's SIGTERM stops all of them, after the same step: JAX's coordination
    service agrees on it. A second Ctrl-C ends a single process at once.
    """

    def __init__(self) -> None:
        self._signals = StopSignals("saving after this step")
        self._agreed: int | None = None
        self._active = contextlib.ExitStack()

    def __enter__(self) -> Interrupt:
        if jax.process_count() == 1:
            self._active.enter_context(self._signals)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._active.close()

    @property
    def _signal(self) -> int | None:
        return self._agreed or self._signals.noted

    @property
    def noted(self) -> bool:
        """Whether this process was asked to stop. Processes may differ: use `exit_code` to act on it together."""
        return self._signal is not None

    def exit_code(self, step: int) -> int | None:
        """128 + the signal if the run must save after `step` and leave, else None. Call at every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self._agreed = signal.SIGTERM
        return None if self._signal is None else 128 + self._signal
