"""The table: what was seen of the workers, and what it means."""

import pytest

from mesh_transformer.cluster.base import Status, WorkerError
from mesh_transformer.cluster.driver.failures import JobState, Limits, classify
from mesh_transformer.cluster.host.worker import category

LIMITS = Limits(step_s=20, phase_s=600)
FINE = Status(0, "running", phase="step", step=7, slowest_step_s=0.1)


def seen(**facts) -> Status:
    """Worker 1, running step 7 but for what is given."""
    usual = {"worker_id": 1, "state": "running", "phase": "step", "step": 7, "slowest_step_s": 0.1}
    return Status(**{**usual, **facts})


def ended(code: int, worker_id: int = 1, **facts) -> Status:
    return Status(worker_id, "ended", exit_code=code, **facts)


def failed(kind: str, code: int = 1, worker_id: int = 1) -> Status:
    return ended(code, worker_id, error=WorkerError(kind, "the message", "Traceback: the traceback"))


def first_step(worker_id: int, idle_s: float) -> Status:
    """In a step before which no time of one is known, for 90 s."""
    return seen(worker_id=worker_id, step=3, slowest_step_s=0, event_age_s=90, idle_s=idle_s)


TABLE = [
    # name, statuses, state of the slice, kind, worker, part of the reason
    ("at work", [FINE, seen()], None, JobState.RUNNING, None, ""),
    ("at work, slice ready", [FINE, seen()], "READY", JobState.RUNNING, None, ""),
    ("a long step is no hang if one before was", [FINE, seen(event_age_s=29, slowest_step_s=10)], None, JobState.RUNNING, None, ""),
    ("a step far longer than those before hangs", [FINE, seen(event_age_s=31, slowest_step_s=10)], None, JobState.CRASHED, 1, "the limit is 30 s"),
    ("a long compilation is no hang", [FINE, seen(phase="compile", event_age_s=500)], None, JobState.RUNNING, None, ""),
    ("a busy agent", [FINE, seen(answer_age_s=5)], None, JobState.RUNNING, None, ""),
    ("one is ready before the other", [ended(0, 0), seen(phase="finish")], None, JobState.RUNNING, None, ""),
    ("one has saved before the other", [ended(143, 0), seen(phase="finish")], None, JobState.RUNNING, None, ""),
    ("done", [ended(0, 0), ended(0)], None, JobState.FINISHED, None, ""),
    ("done, then the slice went", [ended(0, 0), ended(0)], "READY", JobState.FINISHED, None, ""),
    ("SIGTERM, all saved", [ended(143, 0), ended(143)], None, JobState.PREEMPTION_NOTICE, None, "saved"),
    ("SIGTERM at the last step", [ended(0, 0), ended(143)], None, JobState.PREEMPTION_NOTICE, None, "saved"),
    ("slice taken", [FINE, seen()], "PREEMPTED", JobState.PREEMPTED, None, "PREEMPTED"),
    ("slice taken, hosts silent", [FINE, seen(answer_age_s=30)], "SUSPENDED", JobState.PREEMPTED, None, "SUSPENDED"),
    ("slice deleted", [FINE, seen(lost="its agent has died")], "GONE", JobState.PREEMPTED, None, "GONE"),
    ("host gone, no cloud to ask", [FINE, seen(lost="its agent has died", host_alive=False)], None, JobState.PREEMPTED, 1, "its host is gone"),
    ("raylet killed on a slice that is there", [FINE, seen(lost="its agent has died", host_alive=False)], "READY", JobState.CRASHED, 1, "agent"),
    ("actor killed", [FINE, seen(lost="its agent has died", host_alive=True)], None, JobState.CRASHED, 1, "agent"),
    ("network gone, Ray has not seen it", [FINE, seen(answer_age_s=13, host_alive=True)], None, JobState.CRASHED, 1, "13 s"),
    ("network gone, Ray has seen it", [FINE, seen(answer_age_s=13, host_alive=False)], None, JobState.PREEMPTED, 1, "13 s"),
    ("worker killed", [FINE, ended(-9)], None, JobState.CRASHED, 1, "SIGKILL"),
    ("worker out of memory, the others aborted", [ended(-6, 0), ended(-9)], None, JobState.CRASHED, 1, "SIGKILL"),
    ("segmentation fault", [FINE, ended(-11)], None, JobState.CRASHED, 1, "SIGSEGV"),
    ("a neighbour's collective failed first", [failed("machine", 1, 0), ended(-9)], None, JobState.CRASHED, 1, "SIGKILL"),
    ("a neighbour took a death for a bug", [failed("bug", 1, 0), ended(-9)], None, JobState.CRASHED, 1, "SIGKILL"),
    ("worker stopped", [FINE, seen(heartbeat_age_s=16, event_age_s=16)], None, JobState.CRASHED, 1, "stopped"),
    ("worker stopped, the others aborted", [ended(-6, 0, tail="x\ny"), seen(heartbeat_age_s=22)], None, JobState.CRASHED, 1, "stopped"),
    ("stopped while it compiles", [FINE, seen(phase="compile", heartbeat_age_s=16)], None, JobState.CRASHED, 1, "stopped"),
    ("only the step's thread hangs", [FINE, seen(event_age_s=21)], None, JobState.CRASHED, 1, "it hangs"),
    ("the first step computes for long", [first_step(0, idle_s=1), first_step(1, idle_s=2)], None, JobState.RUNNING, None, ""),
    ("the first step of one host computes for long, the other one waits in it", [first_step(0, idle_s=80), first_step(1, idle_s=2)], None, JobState.RUNNING, None, ""),
    ("the first step hangs", [first_step(0, idle_s=21), first_step(1, idle_s=21.5)], None, JobState.CRASHED, 1, "the limit is 20 s (cluster.step_limit)"),
    ("a save has no end", [FINE, seen(phase="save", event_age_s=601)], None, JobState.CRASHED, 1, "the limit is 600 s"),
    ("a save that writes for long", [FINE, seen(phase="save", event_age_s=500, idle_s=2)], None, JobState.RUNNING, None, ""),
    ("a save in which nothing is done", [seen(phase="save", worker_id=0, idle_s=3), seen(phase="save", idle_s=21)], None, JobState.RUNNING, None, ""),
    ("a save in which nobody does anything", [seen(phase="save", worker_id=0, idle_s=20.5), seen(phase="save", idle_s=22)], None, JobState.CRASHED, 1, "no sign of work for 22 s in phase save"),
    ("a validation hangs, the other one waits in it", [seen(phase="validate", worker_id=0, idle_s=22), seen(phase="validate", idle_s=23)], None, JobState.CRASHED, 1, "phase validate"),
    ("a wait for data hangs, the other one waits in the step", [seen(worker_id=0, event_age_s=23), seen(phase="data", idle_s=21)], None, JobState.CRASHED, 1, "phase data"),
    ("the same, a moment before", [seen(worker_id=0, event_age_s=21), seen(phase="data", idle_s=19)], None, JobState.RUNNING, None, ""),
    ("data comes slowly, the other one waits in the step", [seen(worker_id=0, event_age_s=90), seen(phase="data", event_age_s=90, idle_s=2)], None, JobState.RUNNING, None, ""),
    ("data for which the driver is to blame", [seen(worker_id=0, phase="data", event_age_s=90), seen(phase="data", event_age_s=90)], None, JobState.RUNNING, None, ""),
    ("a step hangs, the other one is past it", [seen(worker_id=0, phase="save", event_age_s=22), seen(event_age_s=22)], None, JobState.CRASHED, 1, "phase step"),
    ("a step hangs, the other one waits behind it", [seen(worker_id=0, phase="validate", idle_s=30), seen(event_age_s=22)], None, JobState.CRASHED, 1, "phase step"),
    ("opening the data hangs", [seen(worker_id=0, phase="open", step=0, idle_s=21), seen(phase="open", step=0, idle_s=21)], None, JobState.CRASHED, 0, "phase open"),
    ("the mesh forms slowly", [seen(worker_id=0, phase="start", step=0, event_age_s=90, idle_s=19), seen(phase="start", step=0, event_age_s=90, idle_s=18)], None, JobState.RUNNING, None, ""),
    ("one host's start is slow", [seen(worker_id=0, phase="start", step=0, event_age_s=400, idle_s=300), seen(phase="start", step=0, event_age_s=400, idle_s=1)], None, JobState.RUNNING, None, ""),
    ("the mesh does not form", [seen(worker_id=0, phase="start", step=0, idle_s=21), seen(phase="start", step=0, idle_s=20.5)], None, JobState.CRASHED, 0, "the limit is 20 s"),
    ("an evaluation hangs", [seen(worker_id=0, phase="evaluate", step=0, idle_s=21), seen(phase="evaluate", step=0, idle_s=22)], None, JobState.CRASHED, 1, "phase evaluate"),
    ("an evaluation on one host computes for long", [seen(worker_id=0, phase="evaluate", step=0, idle_s=90), seen(phase="evaluate", step=0, idle_s=3)], None, JobState.RUNNING, None, ""),
    ("a generation hangs", [seen(worker_id=0, phase="generate", step=0, idle_s=21), seen(phase="generate", step=0, idle_s=22)], None, JobState.CRASHED, 1, "phase generate"),
    ("a compilation that does nothing", [FINE, seen(phase="compile", step=6, idle_s=21)], None, JobState.CRASHED, 1, "phase compile"),
    ("a device that is slow in the steps is so elsewhere", [FINE, seen(phase="validate", idle_s=29, slowest_step_s=10)], None, JobState.RUNNING, None, ""),
    ("the last save is being written", [seen(worker_id=0, phase="finish", idle_s=1), seen(phase="finish", idle_s=50)], None, JobState.RUNNING, None, ""),
    ("the end hangs, the other one has ended", [ended(0, 0), seen(phase="finish", idle_s=21)], None, JobState.CRASHED, 1, "phase finish"),
    ("all aborted, nobody knows why", [ended(-6, 0, tail="the last line"), ended(-6)], None, JobState.CRASHED, 0, "the last line"),
    ("an error of the machine", [FINE, failed("machine")], None, JobState.CRASHED, 1, "the message"),
    ("the process is gone without a trace", [FINE, Status(1, "idle")], None, JobState.CRASHED, 1, "gone"),
    ("an unknown exit code", [FINE, ended(3, tail="why")], None, JobState.CRASHED, 1, "code 3: why"),
    ("a config that does not fit", [FINE, failed("user", 2)], None, JobState.USER_ERROR, 1, "the message"),
    ("the user's error, the others aborted", [ended(-6, 0), failed("user", 2)], None, JobState.USER_ERROR, 1, "the message"),
    ("the user's error on a slice that is taken", [FINE, failed("user", 2)], "PREEMPTED", JobState.USER_ERROR, 1, "the message"),
    ("a bug", [FINE, failed("bug")], None, JobState.USER_ERROR, 1, "the traceback"),
    ("a bug, the others aborted", [ended(-6, 0), failed("bug")], None, JobState.USER_ERROR, 1, "the traceback"),
    ("the loss is not finite", [FINE, failed("run")], None, JobState.RUN_ERROR, 1, "the message"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "statuses", "slice_state", "kind", "worker", "reason"), TABLE, ids=[row[0] for row in TABLE]
)
def test_verdict(name, statuses, slice_state, kind, worker, reason):
    verdict = classify(statuses, slice_state, LIMITS)
    assert (verdict.state, verdict.worker_id) == (kind, worker)
    assert reason in verdict.reason
    assert verdict.may_be_slow == ("no sign of work" in verdict.reason)


@pytest.mark.parametrize(
    ("types", "message", "expected"),
    [
        (["UserError", "ValueError", "Exception"], "lr must be positive", "user"),
        (["CredentialsError", "UserError", "ValueError", "Exception"], "no access to gs:// paths", "machine"),
        (["RunError", "RuntimeError", "Exception"], "step 3: not finite", "run"),
        (["TypeError", "Exception"], "f() takes 1 argument", "bug"),
        (["KeyError", "LookupError", "Exception"], "'x'", "bug"),
        (["ValueError", "Exception"], "shapes (3,) and (4,)", "bug"),
        (["ValueError", "Exception"], "UNAVAILABLE: Error writing gs://bucket/x", "machine"),
        (["JaxRuntimeError", "RuntimeError", "Exception"], "UNKNOWN: Gloo all-reduce failed", "machine"),
        (["JaxRuntimeError", "RuntimeError", "Exception"], "RESOURCE_EXHAUSTED: Out of memory", "bug"),
        (["ConnectionResetError", "ConnectionError", "OSError", "Exception"], "reset", "machine"),
        (["RuntimeError", "Exception"], "something", "machine"),
    ],
)
def test_whose_error(types, message, expected):
    assert category(types, message) == expected
