"""Runs a job on a cluster to its end, whatever happens to workers and hosts meanwhile, and shows what the workers tell.

After a failure nothing of the old mesh is used again: every worker and agent is ended, and new processes begin from the
newest checkpoint, with process i on host i as before.
"""

import dataclasses
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mesh_transformer.cluster.backends.agents import AgentCluster
from mesh_transformer.cluster.base import Event, Hosts, HostsMissing, Job, Poll
from mesh_transformer.cluster.driver.failures import SILENT_S, Kind, Limits, Verdict, classify
from mesh_transformer.cluster.host.agent import TakenOver
from mesh_transformer.cluster.host.stream import Streamer
from mesh_transformer.config import parse_config
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.logs import Progress, log
from mesh_transformer.stop_signals import StopSignals

POLL_S = 1.0
SLICE_EVERY_S = 10.0  # between two looks at the state of the slice
SETTLE_S = 3.0  # the cause of a failure may be seen after its consequences
LEAVE_S = 120.0  # for workers that are saving
BACK_OFF_MAX_S = 60.0
MISSING_S = 60.0  # hosts that have not come for so long may have been taken in the meantime
_BADGE = re.compile(r"^\d\d:\d\d:\d\d ([A-Z]) ")  # of our own log lines


class SliceState:
    """The newest state of the slice under a cluster, asked for in a thread: the cloud may take its time to answer."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self.value: str | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="slice-state", daemon=True).start()

    def refresh(self) -> None:
        """Ask now."""
        try:
            self.value = self._hosts.state()
        except Exception as error:  # noqa: BLE001  (not to know is no reason to end a run)
            log.warning("the state of the slice is unknown: %s", error)
            self.value = None

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(SLICE_EVERY_S):
            self.refresh()


class View:
    """What the driver shows of each look: a progress bar, the workers' lines, recoveries, and what the machines were used for.

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


class Supervisor:
    """Runs one job.

    Args:
        view: is told everything.
        stop: its `noted` is the signal after which the job is to save and end.
        clock, sleep: as in `time`.
    """

    def __init__(
        self,
        cluster: AgentCluster,
        job: Job,
        *,
        hosts: Hosts | None = None,
        view: View | None = None,
        stop: StopSignals | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._cluster, self._job = cluster, job
        self._hosts, self._view, self._stop = hosts or Hosts(), view or View(), stop or StopSignals()
        self._clock, self._sleep = clock, sleep
        self._config = parse_config(job.config)
        settings = self._config.cluster
        self._limits = Limits(settings.step_limit, settings.phase_limit)
        self._slice = SliceState(self._hosts)
        self._streamer: Streamer | None = None
        self._wanted: dict[int, dict[str, Any]] = {}
        self._result: Any = None
        self._begun, self._crashes = -1, 0
        self._quiet_at = -1  # the step of the last hang that may have been slowness
        self._asked_to_stop = False
        self.preemptions = self.crashes = 0  # all that there were

    def run(self) -> tuple[int, Any]:
        """The exit code of the job (0, or 128 + the signal that stopped it) and the result of worker 0.

        Raises:
            UserError: the job cannot be done.
            RunError: the job failed by itself, or its workers crash again and again.
        """
        try:
            self._begin()
            while True:
                self._sleep(POLL_S)
                verdict = self._settled(self._look())
                if verdict.kind is Kind.FINISHED:
                    return 0, self._result
                stoppable = {Kind.RUNNING, Kind.USER_ERROR, Kind.RUN_ERROR}
                if verdict.kind not in stoppable and self._stop.received is not None:
                    if verdict.kind is not Kind.NOTICE:
                        log.warning("the workers could not save: %s (%s)", verdict.reason, verdict.kind.value)
                    self._cluster.kill()
                    return 128 + self._stop.received, None
                if verdict.kind is not Kind.RUNNING:
                    self._recover(verdict)
        except TakenOver as error:
            raise UserError(f"this driver gives up: {error}") from error
        finally:
            self._end_stream()
            self._slice.close()
            self._view.close()

    def _begin(self) -> None:
        """Go on with the processes of a driver before this one, if they do this job; else start new ones."""
        poll = self._attach()
        self._statuses = poll.statuses
        by_host = self._job.name != "train" or self._config.data.read_by == "host"
        running = [status for status in self._statuses if status.state == "running"]
        same = all(status.job_key == self._job.key for status in running)
        if by_host and same and len(running) == self._cluster.count:
            step = self._statuses[0].step
            log.info("the workers of this run are at work (step %d): going on with them", step)
            self._view.started()
            self._view.show(poll)
            return
        if running:
            log.info("the workers of this run are still at work: they save and begin anew")
            self._cluster.stop()
            deadline = self._clock() + LEAVE_S
            while any(s.state == "running" for s in self._statuses) and self._clock() < deadline:
                self._sleep(POLL_S)
                self._statuses = self._cluster.poll().statuses
        self._start()

    def _attach(self) -> Poll:
        told: float | None = None
        while True:
            try:
                return self._cluster.attach()
            except HostsMissing as error:
                if self._stop.received is not None:
                    raise RunError(f"stopped while waiting for hosts: {error}") from error
                if told is None or self._clock() - told > MISSING_S:
                    log.warning("waiting for hosts: %s", error)
                    if told is not None:
                        self._hosts.remake()
                    told = self._clock()
                self._sleep(POLL_S)

    def _start(self) -> None:
        self._wanted, self._asked_to_stop = {}, False
        self._cluster.start(self._job)
        self._view.started()

    def _look(self) -> Verdict:
        if self._stop.received is not None and not self._asked_to_stop:
            self._asked_to_stop = True
            self._cluster.stop()
        poll = self._cluster.poll()
        self._statuses = poll.statuses
        self._view.show(poll)
        begun = poll.statuses[0].begun
        if begun is not None and begun["step"] > self._begun:
            self._begun, self._crashes = begun["step"], 0
        if slowest := max(status.slowest_step_s for status in poll.statuses):
            self._allow(slowest_step_s=slowest)
            if min(status.step for status in poll.statuses) > self._quiet_at:
                self._allow(step_s=self._config.cluster.step_limit)
        for worker_id, event in poll.events:
            self._take(worker_id, event)
        if self._streamer is not None and self._streamer.error is not None:
            self._cluster.kill()
            raise self._streamer.error
        return classify(poll.statuses, self._slice.value, self._limits)

    def _take(self, worker_id: int, event: dict[str, Any]) -> None:
        if event["kind"] == "result" and worker_id == 0:
            self._result = event["value"]
        elif event["kind"] == "feed":
            self._wanted[worker_id] = event
            if len(self._wanted) == self._cluster.count and self._streamer is None:
                wanted = [self._wanted[i] for i in range(self._cluster.count)]
                self._streamer = Streamer(self._cluster.feed, self._config, wanted)

    def _settled(self, verdict: Verdict) -> Verdict:
        """The verdict once its cause has had time to be seen, and workers that are saving have ended."""
        final = {Kind.RUNNING, Kind.FINISHED, Kind.NOTICE, Kind.USER_ERROR, Kind.RUN_ERROR}
        if verdict.kind in final:
            return verdict
        began = self._clock()
        self._slice.refresh()
        while verdict.kind not in final and self._clock() - began < self._patience(verdict):
            self._sleep(POLL_S / 2)
            verdict = self._look()
        return verdict

    def _patience(self, verdict: Verdict) -> float:
        """Seconds for the cause to be seen. An error may be told sooner than that another's host has gone."""
        leaving = [s for s in self._statuses if (s.state, s.phase) == ("running", "leave")]
        if any(not (status.silent_s or self._limits.idle(status)) for status in leaving):
            return LEAVE_S  # they are saving
        if verdict.may_be_slow:
            return 0.0  # another cause would have been seen long before
        doubtful = any(status.lost is None and 0 < status.silent_s <= SILENT_S for status in self._statuses)
        return SILENT_S + SETTLE_S if verdict.kind is Kind.CRASH and doubtful else SETTLE_S

    def _recover(self, verdict: Verdict) -> None:
        """End everything, and begin again unless that is pointless."""
        who = "" if verdict.worker_id is None else f"worker {verdict.worker_id}: "
        self._end_stream()
        self._view.failed()
        host_lost = any(status.host_alive is False or status.silent_s for status in self._statuses)
        step = max(status.step for status in self._statuses)
        if verdict.kind not in (Kind.USER_ERROR, Kind.RUN_ERROR):
            log.warning("%s at step %d: %s%s", verdict.kind.value, step, who, verdict.reason)
        self._cluster.kill()
        if verdict.kind is Kind.USER_ERROR:
            raise UserError(f"{who}{verdict.reason}")
        if verdict.kind is Kind.RUN_ERROR:
            raise RunError(verdict.reason)
        if verdict.may_be_slow:
            self._quiet_at = step
            self._allow(step_s=2 * self._limits.step_s)
            log.info("it may only have been slow: now %.0f s are allowed for that", self._limits.step_s)
        if verdict.kind is Kind.CRASH:
            self._back_off(who, verdict)
        else:
            self.preemptions += 1
        if verdict.kind is not Kind.CRASH or host_lost:
            self._hosts.remake()
        self._attach()
        self._start()

    def _back_off(self, who: str, verdict: Verdict) -> None:
        self.crashes += 1
        self._crashes += 1
        allowed = self._config.cluster.max_crashes
        if self._crashes > allowed:
            tail = "" if verdict.worker_id is None else self._statuses[verdict.worker_id].tail
            raise RunError(
                f"{self._crashes} crashes without a newer checkpoint in between (cluster.max_crashes {allowed}); "
                f"the last one: {who}{verdict.reason}\n{tail[-4000:]}"
            )
        pause = min(BACK_OFF_MAX_S, 2.0 ** (self._crashes - 1))
        told = "crash %d of %d without a newer checkpoint: beginning again in %.0f s"
        log.info(told, self._crashes, allowed, pause)
        self._sleep(pause)

    def _allow(self, **limits: float) -> None:
        self._limits = dataclasses.replace(self._limits, **limits)

    def _end_stream(self) -> None:
        if self._streamer is not None:
            self._streamer.stop()
            self._streamer = None
