"""Runs a job on a cluster to its end, and restarts it after failures.

After a failure no process of the old mesh is used again. The driver ends every worker and agent, and starts new
processes from the newest checkpoint, with process i on host i as before.
"""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from mesh_transformer.cluster.backends.agents import AgentCluster
from mesh_transformer.cluster.base import Hosts, HostsMissing, Job, Poll
from mesh_transformer.cluster.driver.display import Display
from mesh_transformer.cluster.driver.failures import AGENT_TIMEOUT_S, JobState, Limits, Verdict, classify
from mesh_transformer.cluster.host.agent import TakenOver
from mesh_transformer.cluster.host.stream import Streamer
from mesh_transformer.config import parse_config
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.logs import log
from mesh_transformer.stop_signals import StopSignals

POLL_S = 1.0
SLICE_POLL_S = 10.0
# time in which the cause of a failure can appear after its consequences
CONFIRM_S = 3.0
# time for workers to save and end
SAVE_TIMEOUT_S = 120.0
MAX_BACKOFF_S = 60.0
# hosts that are missing for this time are recreated: the slice may have been preempted meanwhile
HOSTS_TIMEOUT_S = 60.0


class SliceState:
    """The state of the slice under a cluster. A thread queries it, because the cloud may answer slowly."""

    def __init__(self, hosts: Hosts):
        self._hosts = hosts
        self.value: str | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="slice-state", daemon=True).start()

    def refresh(self) -> None:
        """Query the state now."""
        try:
            self.value = self._hosts.slice_state()
        except Exception as error:  # noqa: BLE001  (an unknown state does not end a run)
            log.warning("the state of the slice is unknown: %s", error)
            self.value = None

    def close(self) -> None:
        """End the queries."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(SLICE_POLL_S):
            self.refresh()


class Supervisor:
    """Runs one job.

    Args:
        display: shows what happens.
        stop: after a signal in `stop.received` the job saves and ends.
        clock, sleep: as in `time`.
    """

    def __init__(
        self,
        cluster: AgentCluster,
        job: Job,
        *,
        hosts: Hosts | None = None,
        display: Display | None = None,
        stop: StopSignals | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._cluster, self._job = cluster, job
        self._hosts, self._display, self._stop = hosts or Hosts(), display or Display(), stop or StopSignals()
        self._clock, self._sleep = clock, sleep
        self._config = parse_config(job.config)
        settings = self._config.cluster
        self._limits = Limits(settings.step_limit, settings.phase_limit)
        self._slice = SliceState(self._hosts)
        self._streamer: Streamer | None = None
        # the event `feed` of each worker
        self._feed_requests: dict[int, dict[str, Any]] = {}
        self._result: Any = None
        # the newest step at which the job started, and the crashes since then
        self._start_step, self._crashes_in_row = -1, 0
        # the step of the last hang that may have been a slow step
        self._slow_step = -1
        self._stop_requested = False
        # totals of this run
        self.preemptions = self.crashes = 0

    def run(self) -> tuple[int, Any]:
        """The exit code of the job (0, or 128 + the signal that stopped it) and the result of worker 0.

        Raises:
            UserError: the job cannot be done.
            RunError: the job failed by itself, or its workers crash repeatedly.
        """
        try:
            self._attach_or_start()
            while True:
                self._sleep(POLL_S)
                verdict = self._confirmed(self._poll())
                if verdict.state is JobState.FINISHED:
                    return 0, self._result
                stoppable = {JobState.RUNNING, JobState.USER_ERROR, JobState.RUN_ERROR}
                if verdict.state not in stoppable and self._stop.received is not None:
                    if verdict.state is not JobState.PREEMPTION_NOTICE:
                        log.warning("the workers could not save: %s (%s)", verdict.reason, verdict.state.value)
                    self._cluster.kill()
                    return 128 + self._stop.received, None
                if verdict.state is not JobState.RUNNING:
                    self._recover(verdict)
        except TakenOver as error:
            raise UserError(f"this driver ends: {error}") from error
        finally:
            self._end_stream()
            self._slice.close()
            self._display.close()

    def _attach_or_start(self) -> None:
        """Continue with the processes of a previous driver if they run this job; otherwise start new ones."""
        poll = self._attach()
        self._statuses = poll.statuses
        by_host = self._job.name != "train" or self._config.data.read_by == "host"
        running = [status for status in self._statuses if status.state == "running"]
        same = all(status.job_key == self._job.key for status in running)
        if by_host and same and len(running) == self._cluster.count:
            log.info("continuing with the running workers (step %d)", self._statuses[0].step)
            self._display.started()
            self._display.show(poll)
            return
        if running:
            log.info("workers of this run are still running: they save and end before new ones start")
            self._cluster.stop()
            deadline = self._clock() + SAVE_TIMEOUT_S
            while any(s.state == "running" for s in self._statuses) and self._clock() < deadline:
                self._sleep(POLL_S)
                self._statuses = self._cluster.poll().statuses
        self._start()

    def _attach(self) -> Poll:
        logged_at: float | None = None
        while True:
            try:
                return self._cluster.attach()
            except HostsMissing as error:
                if self._stop.received is not None:
                    raise RunError(f"stopped while waiting for hosts: {error}") from error
                if logged_at is None or self._clock() - logged_at > HOSTS_TIMEOUT_S:
                    log.warning("waiting for hosts: %s", error)
                    if logged_at is not None:
                        self._hosts.recreate()
                    logged_at = self._clock()
                self._sleep(POLL_S)

    def _start(self) -> None:
        self._feed_requests, self._stop_requested = {}, False
        log.info("starting %d workers", self._cluster.count)
        self._cluster.start(self._job)
        self._display.started()

    def _poll(self) -> Verdict:
        if self._stop.received is not None and not self._stop_requested:
            self._stop_requested = True
            self._cluster.stop()
        poll = self._cluster.poll()
        self._statuses = poll.statuses
        self._display.show(poll)
        start_point = poll.statuses[0].start_point
        if start_point is not None and start_point["step"] > self._start_step:
            self._start_step, self._crashes_in_row = start_point["step"], 0
        if slowest := max(status.slowest_step_s for status in poll.statuses):
            self._set_limits(slowest_step_s=slowest)
            if min(status.step for status in poll.statuses) > self._slow_step:
                self._set_limits(step_s=self._config.cluster.step_limit)
        for worker_id, event in poll.events:
            self._handle(worker_id, event)
        if self._streamer is not None and self._streamer.error is not None:
            self._cluster.kill()
            raise self._streamer.error
        return classify(poll.statuses, self._slice.value, self._limits)

    def _handle(self, worker_id: int, event: dict[str, Any]) -> None:
        if event["kind"] == "result" and worker_id == 0:
            self._result = event["value"]
        elif event["kind"] == "feed":
            self._feed_requests[worker_id] = event
            if len(self._feed_requests) == self._cluster.count and self._streamer is None:
                requests = [self._feed_requests[i] for i in range(self._cluster.count)]
                source = self._job.arguments.get("tune_model_path")
                self._streamer = Streamer(self._cluster.feed, self._config, requests, source)

    def _confirmed(self, verdict: Verdict) -> Verdict:
        """The verdict after some time in which the cause can appear, and in which workers that are saving can end."""
        final = {
            JobState.RUNNING, JobState.FINISHED, JobState.PREEMPTION_NOTICE, JobState.USER_ERROR, JobState.RUN_ERROR,
        }  # fmt: skip
        if verdict.state in final:
            return verdict
        began = self._clock()
        self._slice.refresh()
        while verdict.state not in final and self._clock() - began < self._confirm_s(verdict):
            self._sleep(POLL_S / 2)
            verdict = self._poll()
        return verdict

    def _confirm_s(self, verdict: Verdict) -> float:
        """Seconds to wait for the cause. A collective can fail before the driver knows that another host is gone."""
        saving = [s for s in self._statuses if (s.state, s.phase) == ("running", "finish")]
        if any(not (status.answer_age_s or self._limits.exceeded_by(status)) for status in saving):
            return SAVE_TIMEOUT_S
        if verdict.may_be_slow:
            # another cause would have appeared long before
            return 0.0
        unclear = any(s.lost is None and 0 < s.answer_age_s <= AGENT_TIMEOUT_S for s in self._statuses)
        return AGENT_TIMEOUT_S + CONFIRM_S if verdict.state is JobState.CRASHED and unclear else CONFIRM_S

    def _recover(self, verdict: Verdict) -> None:
        """End all processes, and start new ones unless the same error would occur again."""
        who = "" if verdict.worker_id is None else f"worker {self._cluster.label(verdict.worker_id)}: "
        self._end_stream()
        self._display.failed()
        host_lost = any(status.host_alive is False or status.answer_age_s for status in self._statuses)
        step = max(status.step for status in self._statuses)
        if verdict.state not in (JobState.USER_ERROR, JobState.RUN_ERROR):
            log.warning("%s at step %d: %s%s", verdict.state.value, step, who, verdict.reason)
        self._cluster.kill()
        if verdict.state is JobState.USER_ERROR:
            raise UserError(f"{who}{verdict.reason}")
        if verdict.state is JobState.RUN_ERROR:
            raise RunError(verdict.reason)
        if verdict.may_be_slow:
            self._slow_step = step
            self._set_limits(step_s=2 * self._limits.step_s)
            log.info("the worker may be slow instead of hung: the limit is now %.0f s", self._limits.step_s)
        if verdict.state is JobState.CRASHED:
            self._back_off(who, verdict)
        else:
            self.preemptions += 1
        if verdict.state is not JobState.CRASHED or host_lost:
            self._hosts.recreate()
        self._attach()
        self._start()

    def _back_off(self, who: str, verdict: Verdict) -> None:
        self.crashes += 1
        self._crashes_in_row += 1
        allowed = self._config.cluster.max_crashes
        if self._crashes_in_row > allowed:
            tail = "" if verdict.worker_id is None else self._statuses[verdict.worker_id].tail
            raise RunError(
                f"{self._crashes_in_row} crashes without a newer checkpoint in between (cluster.max_crashes "
                f"{allowed}); the last one: {who}{verdict.reason}",
                *tail[-4000:].splitlines(),
            )
        pause_s = min(MAX_BACKOFF_S, 2.0 ** (self._crashes_in_row - 1))
        text = "crash %d of %d without a newer checkpoint: restarting in %.0f s"
        log.info(text, self._crashes_in_row, allowed, pause_s)
        self._sleep(pause_s)

    def _set_limits(self, **limits: float) -> None:
        self._limits = dataclasses.replace(self._limits, **limits)

    def _end_stream(self) -> None:
        if self._streamer is not None:
            self._streamer.stop()
            self._streamer = None
