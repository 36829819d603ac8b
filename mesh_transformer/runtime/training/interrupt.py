"""What asks a training run to save and to stop: a signal to its process, or another thread."""

import signal
from types import FrameType
from typing import Protocol, Self

import jax
from jax.experimental import multihost_utils

from mesh_transformer import environment
from mesh_transformer.stop_signals import TERMINATIONS, StopSignals


class StopRequest(Protocol):
    """Asks a run to save and to stop."""

    received: int | None
    """The number of the signal that asks for it, if there is one."""
    in_loop: bool
    """Whether the run computes steps. Before, it has nothing to save."""

    def exit_code(self, step: int) -> int | None:
        """128 + the number of the signal if the run must save after `step` and stop, else None. The run calls it at
        each step."""


class Interrupt(StopSignals):
    """While active, SIGTERM, SIGHUP and Ctrl-C request a save and a stop, and do not end the process.

    In a job of several processes, a SIGTERM or SIGHUP to one of them stops all, after the same step. The coordination
    service of JAX, which knows SIGTERM alone, chooses the step. In a job of one process, a second Ctrl-C ends it at
    once, and so does one before the first step. `received` can differ between processes, but `exit_code` is the same in
    all.
    """

    def __init__(self) -> None:
        super().__init__("saving after this step")
        self.in_loop = False

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            return super().__enter__()
        for number in set(TERMINATIONS) - {signal.SIGTERM}:
            self._before[number] = signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self.in_loop:
            environment.interrupt(number, frame)
        super()._receive(number, frame)

    def exit_code(self, step: int) -> int | None:
        """See `StopRequest`."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.received = signal.SIGTERM
        return None if self.received is None else 128 + self.received
