"""A request to stop a run, turned into "save after this step, then leave" in all its processes."""

from __future__ import annotations

import signal

import jax
from jax.experimental import multihost_utils

from mesh_transformer.stop_signals import StopSignals


class Interrupt(StopSignals):
    """While active, SIGTERM and Ctrl-C ask the run to stop instead of ending the process.

    In a job of several processes any one's SIGTERM stops all of them, after the same step: JAX's coordination
    service agrees on it. A second Ctrl-C ends a single process at once. Processes may differ in what is `noted`: use
    `exit_code` to act on it together.
    """

    def __init__(self) -> None:
        super().__init__("saving after this step")

    def __enter__(self) -> Interrupt:
        if jax.process_count() == 1:
            super().__enter__()
        return self

    def exit_code(self, step: int) -> int | None:
        """128 + the signal if the run must save after `step` and leave, else None. Call at every step."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.noted = signal.SIGTERM
        return None if self.noted is None else 128 + self.noted
