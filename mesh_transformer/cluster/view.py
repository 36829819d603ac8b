"""What the driver shows: a progress bar, the workers' lines, recoveries, and what the machines were used for."""

import re
import sys
import time
from typing import Any

from mesh_transformer.cluster.base import Event, Poll
from mesh_transformer.logs import Progress, log

_BADGE = re.compile(r"^\d\d:\d\d:\d\d ([A-Z]) ")  # of our own log lines


class View:
    """Takes what each look at the workers brought.

    Args:
        price: of one chip for one hour, in whatever currency; None: no sum is shown.
    """

    def __init__(self, price: float | None = None):
        self._price, self._chips = price, 0
        self._since: float | None = None  # since when the workers run
        self._chip_hours = 0.0
        self._bar: Progress | None = None
        self._begun: Event | None = None
        self._failed_at: float | None = None
        self._began = time.monotonic()

    def show(self, poll: Poll) -> None:
        """Lines of worker 0, warnings and foreign output of the others; the bar."""
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        for worker_id, line in poll.lines:
            badge = _BADGE.match(line)
            if worker_id == 0 or badge is None or badge[1] != "I":
                sys.stderr.write(f"{clear}[{worker_id}] {line}\n")
        begun = poll.statuses[0].begun
        if begun is not None and begun != self._begun:
            self._begun = begun
            self._show_begun(begun)
        for worker_id, event in poll.events:
            if worker_id == 0 and event["kind"] == "metrics":
                self._show_metrics(event["step"], event["scalars"])
        sys.stderr.flush()

    def started(self) -> None:
        """Worker processes have been started."""
        self._begun = None
        self._since = time.monotonic()

    def failed(self) -> None:
        """They are to be started again."""
        self._failed_at = self._failed_at or time.monotonic()
        self.stopped()

    def stopped(self) -> None:
        """They have ended: their time counts no more."""
        if self._since is not None:
            self._chip_hours += self._chips * (time.monotonic() - self._since) / 3600
        self._since = None

    def close(self) -> None:
        """Leave the bar, and tell what the run took."""
        self.stopped()
        if self._bar is not None:
            self._bar.close()
        if self._chips:
            hours, used = (time.monotonic() - self._began) / 3600, self._chip_hours
            price = "" if self._price is None else f", {self._price * used:,.2f} at {self._price} each"
            told = "cost: %d chips, %.3f h of this driver, %.3f chip-hours of workers%s"
            log.info(told, self._chips, hours, used, price)

    def _show_begun(self, event: Event) -> None:
        self._chips = event["chips"]
        if self._bar is not None:
            self._bar.close()
        self._bar = Progress("training", event["total"], unit="step", done=event["step"])
        if event["step"] or event["steps_redone"]:
            log.info("going on after step %d; %d steps redone so far", event["step"], event["steps_redone"])

    def _show_metrics(self, step: int, scalars: dict[str, Any]) -> None:
        if self._failed_at is not None:
            lasted = time.monotonic() - self._failed_at
            log.info("recovered: step %d, %.1f s after the failure was seen", step, lasted)
            self._failed_at = None
        if self._bar is not None:
            loss, speed = scalars["train/loss"], scalars["train/tokens_per_sec"]
            self._bar.update(step, loss=f"{loss:.4f}", **{"tokens/s": f"{speed:,.0f}"})
