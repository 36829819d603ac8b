"""Shows the progress of a job to the user of the driver."""

import re
import sys
import time
from collections.abc import Callable
from typing import Any

from mesh_transformer.cluster.base import Event, Poll
from mesh_transformer.logs import Progress, log, step_summary

# the level of a line of our own log
_LOG_LEVEL = re.compile(r"^\d\d:\d\d:\d\d ([A-Z]) ")


class Display:
    """Shows on standard error: a progress bar, the lines of the workers, recoveries, and the cost.

    Args:
        price: price of one chip for one hour, in any currency; None: no sum is shown.
        label: the words for a worker, by its number (`AgentCluster.label`).
    """

    def __init__(self, price: float | None = None, label: Callable[[int], str] = str):
        self._price, self._label, self._chips = price, label, 0
        # when the current workers started; None while none run
        self._workers_started_at: float | None = None
        self._chip_hours = 0.0
        self._bar: Progress | None = None
        self._start_point: Event | None = None
        self._failed_at: float | None = None
        self._driver_started_at = time.monotonic()

    def show(self, poll: Poll) -> None:
        """Show the lines of worker 0, the other workers' lines that are no information of our own log, and the bar."""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        for worker_id, line in poll.lines:
            level = _LOG_LEVEL.match(line)
            if worker_id == 0 or level is None or level[1] != "I":
                sys.stderr.write(f"{clear}[{self._label(worker_id)}] {line}\n")
        start_point = poll.statuses[0].start_point
        if start_point is not None and start_point != self._start_point:
            self._start_point = start_point
            self._show_start(start_point)
        for worker_id, event in poll.events:
            if worker_id == 0 and event["kind"] == "metrics":
                self._show_metrics(event["step"], event["scalars"])
        sys.stderr.flush()

    def started(self) -> None:
        """Record that worker processes have been started."""
        self._start_point = None
        self._workers_started_at = time.monotonic()

    def failed(self) -> None:
        """Record that the workers have failed."""
        self._failed_at = self._failed_at or time.monotonic()
        self.ended()

    def ended(self) -> None:
        """Record that the workers have ended: they cost no further time."""
        if self._workers_started_at is not None:
            self._chip_hours += self._chips * (time.monotonic() - self._workers_started_at) / 3600
        self._workers_started_at = None

    def close(self) -> None:
        """Close the bar and log the cost."""
        self.ended()
        if self._bar is not None:
            self._bar.close()
        if self._chips:
            hours, used = (time.monotonic() - self._driver_started_at) / 3600, self._chip_hours
            price = "" if self._price is None else f", {self._price * used:,.2f} at {self._price} each"
            text = "cost: %d chips, %.3f h of this driver, %.3f chip-hours of workers%s"
            log.info(text, self._chips, hours, used, price)

    def _show_start(self, start_point: Event) -> None:
        self._chips = start_point["chips"]
        if self._bar is not None:
            self._bar.close()
        self._bar = Progress("training", start_point["total"], unit="step", done=start_point["step"])
        if start_point["step"] or start_point["steps_redone"]:
            text = "resuming after step %d; %d steps repeated so far"
            log.info(text, start_point["step"], start_point["steps_redone"])

    def _show_metrics(self, step: int, scalars: dict[str, Any]) -> None:
        if self._failed_at is not None:
            lasted = time.monotonic() - self._failed_at
            log.info("recovered: step %d, %.1f s after the failure was detected", step, lasted)
            self._failed_at = None
        if self._bar is not None:
            self._bar.update(step, **step_summary(scalars))
