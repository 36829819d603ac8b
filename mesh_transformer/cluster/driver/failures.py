"""Classifies the state of all workers: a pure function from their statuses to a verdict.

A failure is a preemption (the cloud took the machines), a crash (a worker was killed, stopped, hung or lost its host,
or the machine had an error), or an error of the user, which would occur again.
"""

import dataclasses
import enum
import signal
from collections.abc import Callable, Sequence
from functools import partial

from mesh_transformer.cluster.base import Status

# an agent without an answer for this time is unreachable
AGENT_TIMEOUT_S = 12.0
# a process without a heartbeat for this time is stopped
HEARTBEAT_TIMEOUT_S = 15.0
# the phases of one step, in order
PHASES = ("start", "open", "data", "compile", "step", "validate", "save", "finish")
PREEMPTED_STATES = {"PREEMPTED", "SUSPENDED", "SUSPENDING", "TERMINATED", "STOPPED", "STOPPING", "FAILED", "DELETING",
         "GONE"}  # fmt: skip
# a worker that saved after a signal exits with one of these
CLEAN_STOP_CODES = {128 + number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP", "SIGINT")}


class JobState(enum.Enum):
    """The state of a job. The driver reacts to each in its own way; the values are part of its messages."""

    RUNNING = "running"
    FINISHED = "finished"
    # every worker has saved and ended after a signal
    PREEMPTION_NOTICE = "preemption notice"
    PREEMPTED = "preemption"
    CRASHED = "worker crash"
    USER_ERROR = "user error"
    RUN_ERROR = "failed run"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The state of a job and its cause.

    Args:
        worker_id: the worker that caused it; None: all of them.
        may_be_slow: the worker may be slow instead of hung.
    """

    state: JobState
    reason: str = ""
    worker_id: int | None = None
    may_be_slow: bool = False


@dataclasses.dataclass(frozen=True)
class Limits:
    """Time limits for the thread of a job, in seconds.

    Args:
        step_s: for a step, beyond the slowest recent step. In any other phase, and while no step has been timed: the
            longest time without a sign of work.
        phase_s: for any phase, even with signs of work.
        slowest_step_s: the slowest step of the previous processes, until the current ones have timed a step.
    """

    step_s: float
    phase_s: float
    slowest_step_s: float = 0.0

    def inactivity_s(self, status: Status) -> float:
        """How long a worker may be inactive. A device that is slow in its steps is slow in other phases too."""
        return self.step_s + (status.slowest_step_s or self.slowest_step_s)

    def exceeded_by(self, status: Status) -> bool:
        """Whether a worker has been inactive for too long."""
        return _inactive_s(status) > self.inactivity_s(status)


def classify(statuses: Sequence[Status], slice_state: str | None, limits: Limits) -> Verdict:
    """The verdict on the workers of a running job.

    Args:
        slice_state: as `Hosts.slice_state` returns it.
    """
    codes = [status.exit_code for status in statuses]
    if verdict := _first(statuses, _user_or_run_error):
        return verdict
    if slice_state in PREEMPTED_STATES:
        return Verdict(JobState.PREEMPTED, f"the slice is {slice_state}")
    if all(code == 0 for code in codes):
        return Verdict(JobState.FINISHED)
    if all(code == 0 or code in CLEAN_STOP_CODES for code in codes):
        return Verdict(JobState.PREEMPTION_NOTICE, "every worker has saved and ended because of a signal")
    failed = _first(statuses, partial(_unreachable, slice_state), _killed, _stopped, _bug, _failed)
    return failed or _hung(statuses, limits) or Verdict(JobState.RUNNING)


def _first(statuses: Sequence[Status], *rules: Callable[[Status], tuple[JobState, str] | None]) -> Verdict | None:
    """The result of the first rule that applies to a worker."""
    for rule in rules:
        for status in statuses:
            if result := rule(status):
                return Verdict(*result, status.worker_id)
    return None


def _user_or_run_error(status: Status) -> tuple[JobState, str] | None:
    """An error that a restart cannot repair, by its own type."""
    states: dict[str, JobState] = {"user": JobState.USER_ERROR, "run": JobState.RUN_ERROR}
    if status.error is not None and status.error.category in states:
        return states[status.error.category], status.error.message
    return None


def _unreachable(slice_state: str | None, status: Status) -> tuple[JobState, str] | None:
    if status.lost is None and status.answer_age_s <= AGENT_TIMEOUT_S:
        return None
    why = status.lost or f"its host has not answered for {status.answer_age_s:.0f} s"
    if status.host_alive is False and slice_state is None:
        return JobState.PREEMPTED, f"its host is gone ({why})"
    return JobState.CRASHED, why


def _killed(status: Status) -> tuple[JobState, str] | None:
    """A signal killed the process. SIGABRT does not count: JAX aborts the other processes when one is gone."""
    code = status.exit_code
    if code is None or code >= 0 or -code == signal.SIGABRT:
        return None
    return JobState.CRASHED, f"its process was killed by {signal.Signals(-code).name}"


def _stopped(status: Status) -> tuple[JobState, str] | None:
    if status.state == "running" and status.heartbeat_age_s > HEARTBEAT_TIMEOUT_S:
        return JobState.CRASHED, f"its process has stopped: no heartbeat for {status.heartbeat_age_s:.0f} s"
    return None


def _bug(status: Status) -> tuple[JobState, str] | None:
    if status.error is not None and status.error.category == "bug":
        return JobState.USER_ERROR, status.error.traceback
    return None


def _failed(status: Status) -> tuple[JobState, str] | None:
    if status.error is not None:
        return JobState.CRASHED, status.error.message
    if status.state == "idle":
        return JobState.CRASHED, "its process is gone"
    if status.exit_code is not None and status.exit_code != 0 and status.exit_code not in CLEAN_STOP_CODES:
        last = status.tail.strip().rpartition("\n")[2]
        return JobState.CRASHED, f"its process ended with code {status.exit_code}: {last[:500]}"
    return None


def _hung(statuses: Sequence[Status], limits: Limits) -> Verdict | None:
    """In one mesh the workers wait for each other. So the cause is the worker that is furthest behind, unless it
    works."""
    running = sorted((s for s in statuses if s.state == "running"), key=lambda s: (_progress(s), -_inactive_s(s)))
    for status in running:
        limit = limits.inactivity_s(status)
        where = f"in phase {status.phase}, step {status.step}; the limit is"
        if status.event_age_s > max(limits.phase_s, limit):
            reason = f"it hangs: {status.event_age_s:.0f} s {where} {limits.phase_s:.0f} s (cluster.phase_limit)"
            return Verdict(JobState.CRASHED, reason, status.worker_id)
        if limits.exceeded_by(status) and not any(_may_wait_for(status, other, limits) for other in running):
            inactive = f"no sign of work for {_inactive_s(status):.0f} s"
            reason = f"it hangs: {inactive} {where} {limit:.0f} s (cluster.step_limit)"
            return Verdict(JobState.CRASHED, reason, status.worker_id, may_be_slow=True)
    return None


def _in_timed_step(status: Status) -> bool:
    """Whether a worker is in a step whose usual time is known. A device shows no sign of work until the step ends."""
    return status.phase == "step" and status.slowest_step_s > 0


def _inactive_s(status: Status) -> float:
    return status.event_age_s if _in_timed_step(status) else status.idle_s


def _progress(status: Status) -> tuple[int, int]:
    """Step and phase of a worker, comparable."""
    return status.step, PHASES.index(status.phase) if status.phase in PHASES else 0


def _may_wait_for(status: Status, other: Status, limits: Limits) -> bool:
    """Whether a worker may wait for another one that works. In a timed step all workers finish at the same time."""
    behind = _progress(other) < _progress(status)
    beside = _progress(other) == _progress(status) and not _in_timed_step(status)
    return (behind or beside) and not limits.exceeded_by(other)
