"""Shows the progress of a job to the user of the driver."""

import re
import sys
import time
from collections.abc import Callable, Sequence

from mesh_transformer.cluster.base import REPORTED, Event, Poll
from mesh_transformer.errors import plural
from mesh_transformer.logs import Progress, log, step_summary

# the level of a line of our own log
_LOG_LEVEL = re.compile(r"^\d\d:\d\d:\d\d ([A-Z]) ")
# a message of the C++ of XLA and JAX (absl); its further lines have no such beginning
_OF_CPP = re.compile(r"[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] |WARNING: All log messages before absl::")
# other lines that libraries write: parts of Gloo's, because its threads mix their lines, and Orbax's at a preemption
_OF_LIBRARIES = re.compile(
    r"\[Gloo\] |(Rank|\d|is connected to|peer ranks\.|Expected number of connected peer ranks is :|\s)*$|"
    r"\d\d:\d\d:\d\d [A-Z] \[process=\d+\]\[thread=\S+\] Reached preemption sync point"
)
_OF_PYTHON = re.compile(r"Traceback \(most recent|Fatal Python error|Exception ignored|wandb: ")


class Display:
    """Shows on standard error: a progress bar, the lines of the workers, recoveries, and the cost.

    Args:
        price: price of one chip for one hour, in any currency; None: no sum is shown.
        label: the words for a worker, by its number (`AgentCluster.label`).
        verbose: show all lines of all workers.
    """

    def __init__(self, price: float | None = None, label: Callable[[int], str] = str, *, verbose: bool = False):
        self._price, self._label, self._verbose, self._chips = price, label, verbose, 0
        # the workers whose last line belongs to a message of C++
        self._in_cpp_message: set[int] = set()
        # when the current workers started; None while none run
        self._workers_started_at: float | None = None
        self._chip_hours = 0.0
        self._bar: Progress | None = None
        self._start_point: Event | None = None
        self._failed_at: float | None = None
        self._driver_started_at = time.monotonic()

    def show(self, poll: Poll) -> None:
        """Show the lines of worker 0, the other workers' lines that are no information of our own log, and the bar.

        The lines of libraries, and of errors that the driver shows, are left out unless `verbose` is set.
        """
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        for worker_id, line in poll.lines:
            if self._verbose or self._is_for_user(worker_id, line):
                sys.stderr.write(f"{clear}[{self._label(worker_id)}] {line}\n")
        start_point = poll.statuses[0].start_point
        if start_point is not None and start_point != self._start_point:
            self._start_point = start_point
            self._show_start(start_point)
        metrics = [event for worker_id, event in poll.events if worker_id == 0 and event["kind"] == "metrics"]
        if metrics:
            self._show_metrics(metrics)
        sys.stderr.flush()

    def started(self) -> None:
        """Record that worker processes have been started."""
        self._start_point = None
        self._in_cpp_message.clear()
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
            text = "cost: %s, %.3f h of this driver, %.3f chip-hours of workers%s"
            log.info(text, plural(self._chips, "chip"), hours, used, price)

    def _is_for_user(self, worker_id: int, line: str) -> bool:
        level = _LOG_LEVEL.match(line)
        if _OF_CPP.match(line):
            self._in_cpp_message.add(worker_id)
        elif level or _OF_PYTHON.match(line):
            self._in_cpp_message.discard(worker_id)
        reported = level is not None and line.startswith(REPORTED, level.end())
        if worker_id in self._in_cpp_message or _OF_LIBRARIES.match(line) or reported:
            return False
        return worker_id == 0 or level is None or level[1] != "I"

    def _show_start(self, start_point: Event) -> None:
        self._chips = start_point["chips"]
        if self._bar is not None:
            self._bar.close()
        self._bar = Progress("training", start_point["total"], unit="step", done=start_point["step"])
        if start_point["step"] or start_point["steps_redone"]:
            text = "resuming after step %d; %s repeated so far"
            log.info(text, start_point["step"], plural(start_point["steps_redone"], "step"))

    def _show_metrics(self, metrics: Sequence[Event]) -> None:
        """Show the newest of the metrics that have arrived together, so that the rate is the workers' rate."""
        if self._failed_at is not None:
            lasted = time.monotonic() - self._failed_at
            log.info("recovered: step %d, %.1f s after the failure was detected", metrics[0]["step"], lasted)
            self._failed_at = None
        if self._bar is not None:
            self._bar.update(metrics[-1]["step"], **step_summary(metrics[-1]["scalars"]))
