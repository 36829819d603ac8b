"""What a look at the workers means: a pure function from what was seen to a verdict.

Preemption (the machines were taken), a worker's crash (killed, stopped, hung, cut off, an error of the machine), or the
user's error, which another attempt would only meet again.
"""

import dataclasses
import enum
import signal
from collections.abc import Callable, Sequence
from functools import partial

from mesh_transformer.cluster.base import Status

SILENT_S = 12.0  # an agent that answers nothing for so long is unreachable
STOPPED_S = 15.0  # a process of which no thread says anything for so long is stopped
ORDER = ("start", "open", "data", "compile", "step", "validate", "save", "leave")  # of the phases of one step
PREEMPTED_STATES = {"PREEMPTED", "SUSPENDED", "SUSPENDING", "TERMINATED", "STOPPED", "STOPPING", "FAILED", "DELETING",
         "GONE"}  # fmt: skip
CLEAN_STOP_CODES = {128 + signal.SIGTERM, 128 + signal.SIGINT}  # saved and ended because of a signal


class Kind(enum.Enum):
    """What to do, one way each."""

    RUNNING = "running"
    FINISHED = "finished"
    NOTICE = "preemption notice"  # every worker has saved and ended
    PREEMPTION = "preemption"
    CRASH = "worker crash"
    USER_ERROR = "user error"
    RUN_ERROR = "failed run"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What was seen, of which worker (None: of all), and why that is thought; `may_be_slow`: it may only have been slow."""

    kind: Kind
    reason: str = ""
    worker_id: int | None = None
    may_be_slow: bool = False


@dataclasses.dataclass(frozen=True)
class Limits:
    """Seconds that the thread of a job may be silent.

    Args:
        step_s: in a step, beyond the slowest one so far; in any other phase, or in a step while no time of one is known, as
            long as nothing is done.
        phase_s: in any phase, whatever is done.
        slowest_step_s: of the processes before these, until theirs is known.
    """

    step_s: float
    phase_s: float
    slowest_step_s: float = 0.0

    def of(self, status: Status) -> float:
        """How long a worker may do nothing. A device that is slow in the steps is so elsewhere."""
        return self.step_s + (status.slowest_step_s or self.slowest_step_s)

    def idle(self, status: Status) -> bool:
        """Whether it has done nothing for too long."""
        return _quiet_s(status) > self.of(status)


def classify(statuses: Sequence[Status], slice_state: str | None, limits: Limits) -> Verdict:
    """The verdict on one look at all workers of a running job.

    Args:
        slice_state: as `Hosts.state` gives it.
    """
    codes = [status.exit_code for status in statuses]
    if told := _first(statuses, _told):
        return told
    if slice_state in PREEMPTED_STATES:
        return Verdict(Kind.PREEMPTION, f"the slice is {slice_state}")
    if all(code == 0 for code in codes):
        return Verdict(Kind.FINISHED)
    if all(code == 0 or code in CLEAN_STOP_CODES for code in codes):
        return Verdict(Kind.NOTICE, "every worker has saved and ended because of a signal")
    failed = _first(statuses, partial(_cut_off, slice_state), _killed, _stopped, _bug, _failed)
    return failed or _hung(statuses, limits) or Verdict(Kind.RUNNING)


def _first(statuses: Sequence[Status], *rules: Callable[[Status], tuple[Kind, str] | None]) -> Verdict | None:
    """What the first rule says that has something to say of a worker."""
    for rule in rules:
        for status in statuses:
            if found := rule(status):
                return Verdict(*found, status.worker_id)
    return None


def _told(status: Status) -> tuple[Kind, str] | None:
    """An error that says itself that it is not the machine's."""
    kinds: dict[str, Kind] = {"user": Kind.USER_ERROR, "run": Kind.RUN_ERROR}
    if status.error is not None and status.error.category in kinds:
        return kinds[status.error.category], status.error.message
    return None


def _cut_off(slice_state: str | None, status: Status) -> tuple[Kind, str] | None:
    if status.lost is None and status.silent_s <= SILENT_S:
        return None
    why = status.lost or f"its host has not answered for {status.silent_s:.0f} s"
    taken = status.host_alive is False and slice_state is None
    return (Kind.PREEMPTION, f"its host is gone ({why})") if taken else (Kind.CRASH, why)


def _killed(status: Status) -> tuple[Kind, str] | None:
    """Killed from outside. JAX aborts the others when one is gone: that is not the cause."""
    code = status.exit_code
    if code is None or code >= 0 or -code == signal.SIGABRT:
        return None
    return Kind.CRASH, f"its process was killed by {signal.Signals(-code).name}"


def _stopped(status: Status) -> tuple[Kind, str] | None:
    if status.state == "running" and status.alive_age_s > STOPPED_S:
        return Kind.CRASH, f"its process has stopped: no sign of life for {status.alive_age_s:.0f} s"
    return None


def _bug(status: Status) -> tuple[Kind, str] | None:
    if status.error is not None and status.error.category == "bug":
        return Kind.USER_ERROR, status.error.traceback
    return None


def _failed(status: Status) -> tuple[Kind, str] | None:
    if status.error is not None:
        return Kind.CRASH, status.error.message
    if status.state == "idle":
        return Kind.CRASH, "its process is gone"
    if status.exit_code is not None and status.exit_code != 0 and status.exit_code not in CLEAN_STOP_CODES:
        last = status.tail.strip().rpartition("\n")[2]
        return Kind.CRASH, f"its process ended with code {status.exit_code}: {last[:500]}"
    return None


def _hung(statuses: Sequence[Status], limits: Limits) -> Verdict | None:
    """In one mesh each waits for the others: the one that is furthest behind is the cause, unless it is still at work."""
    running = sorted((s for s in statuses if s.state == "running"), key=lambda s: (_place(s), -_quiet_s(s)))
    for status in running:
        limit = limits.of(status)
        where = f"in phase {status.phase}, step {status.step}; the limit is"
        if status.beat_age_s > max(limits.phase_s, limit):
            told = f"it hangs: {status.beat_age_s:.0f} s {where} {limits.phase_s:.0f} s (cluster.phase_limit)"
            return Verdict(Kind.CRASH, told, status.worker_id)
        if limits.idle(status) and not any(_awaited(other, status, limits) for other in running):
            quiet = f"nothing done for {_quiet_s(status):.0f} s"
            told = f"it hangs: {quiet} {where} {limit:.0f} s (cluster.step_limit)"
            return Verdict(Kind.CRASH, told, status.worker_id, may_be_slow=True)
    return None


def _timed(status: Status) -> bool:
    """Whether it is in a step of which one knows how long it takes. What it does on a device shows only when it ends."""
    return status.phase == "step" and status.slowest_step_s > 0


def _quiet_s(status: Status) -> float:
    return status.beat_age_s if _timed(status) else status.idle_s


def _place(status: Status) -> tuple[int, int]:
    """How far a worker has come."""
    return status.step, ORDER.index(status.phase) if status.phase in ORDER else 0


def _awaited(other: Status, status: Status, limits: Limits) -> bool:
    """Whether a worker may be waiting for another one, which is at work. In a step all are done at the same time."""
    behind = _place(other) < _place(status)
    beside = _place(other) == _place(status) and not _timed(status)
    return (behind or beside) and not limits.idle(other)
