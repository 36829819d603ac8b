"""The table of verdicts: states of the workers and of the slice, and the expected state of the job."""

import pytest

from mesh_transformer.cluster.base import Status, WorkerError
from mesh_transformer.cluster.driver.failures import JobState, Limits, classify
from mesh_transformer.cluster.host.worker import category

LIMITS = Limits(step_s=20, phase_s=600)
FINE = Status(0, "running", phase="step", step=7, slowest_step_s=0.1)


def running(**facts) -> Status:
    """Worker 1, running step 7, with changes."""
    usual = {"worker_id": 1, "state": "running", "phase": "step", "step": 7, "slowest_step_s": 0.1}
    return Status(**{**usual, **facts})


def ended(code: int, worker_id: int = 1, **facts) -> Status:
    return Status(worker_id, "ended", exit_code=code, **facts)


def failed(kind: str, code: int = 1, worker_id: int = 1) -> Status:
    return ended(code, worker_id, error=WorkerError(kind, "the message", "Traceback: the traceback"))


def first_step(worker_id: int, idle_s: float) -> Status:
    """A worker that has been in a step for 90 s, with no timed step before it."""
    return running(worker_id=worker_id, step=3, slowest_step_s=0, event_age_s=90, idle_s=idle_s)


TABLE = [
    # name, statuses, state of the slice, state of the job, worker, part of the reason
    ("running", [FINE, running()], None, JobState.RUNNING, None, ""),
    ("running, slice ready", [FINE, running()], "READY", JobState.RUNNING, None, ""),
    ("a long step is no hang after another long one", [FINE, running(event_age_s=29, slowest_step_s=10)], None,
     JobState.RUNNING, None, ""),
    ("a step much longer than the slowest one hangs", [FINE, running(event_age_s=31, slowest_step_s=10)], None,
     JobState.CRASHED, 1, "the limit is 30 s"),
    ("a long compilation is no hang", [FINE, running(phase="compile", event_age_s=500)], None, JobState.RUNNING, None,
     ""),
    ("a busy agent", [FINE, running(answer_age_s=5)], None, JobState.RUNNING, None, ""),
    ("one finishes before the other", [ended(0, 0), running(phase="finish")], None, JobState.RUNNING, None, ""),
    ("one saves before the other", [ended(143, 0), running(phase="finish")], None, JobState.RUNNING, None, ""),
    ("finished", [ended(0, 0), ended(0)], None, JobState.FINISHED, None, ""),
    ("done, slice ready", [ended(0, 0), ended(0)], "READY", JobState.FINISHED, None, ""),
    ("SIGTERM, all saved", [ended(143, 0), ended(143)], None, JobState.PREEMPTION_NOTICE, None, "saved"),
    ("SIGTERM at the last step", [ended(0, 0), ended(143)], None, JobState.PREEMPTION_NOTICE, None, "saved"),
    ("slice preempted", [FINE, running()], "PREEMPTED", JobState.PREEMPTED, None, "PREEMPTED"),
    ("slice preempted, agents do not answer", [FINE, running(answer_age_s=30)], "SUSPENDED", JobState.PREEMPTED, None,
     "SUSPENDED"),
    ("slice deleted", [FINE, running(lost="its agent has died")], "GONE", JobState.PREEMPTED, None, "GONE"),
    ("host gone, no cloud", [FINE, running(lost="its agent has died", host_alive=False)], None, JobState.PREEMPTED, 1,
     "its host is gone"),
    ("raylet killed on a ready slice", [FINE, running(lost="its agent has died", host_alive=False)], "READY",
     JobState.CRASHED, 1, "agent"),
    ("actor killed", [FINE, running(lost="its agent has died", host_alive=True)], None, JobState.CRASHED, 1, "agent"),
    ("network gone, unknown to Ray", [FINE, running(answer_age_s=13, host_alive=True)], None, JobState.CRASHED, 1,
     "13 s"),
    ("network gone, known to Ray", [FINE, running(answer_age_s=13, host_alive=False)], None, JobState.PREEMPTED, 1,
     "13 s"),
    ("worker killed", [FINE, ended(-9)], None, JobState.CRASHED, 1, "SIGKILL"),
    ("worker out of memory, the other one aborted", [ended(-6, 0), ended(-9)], None, JobState.CRASHED, 1, "SIGKILL"),
    ("segmentation fault", [FINE, ended(-11)], None, JobState.CRASHED, 1, "SIGSEGV"),
    ("the collective of another worker failed first", [failed("machine", 1, 0), ended(-9)], None, JobState.CRASHED, 1,
     "SIGKILL"),
    ("another worker reports a bug because of the death", [failed("bug", 1, 0), ended(-9)], None, JobState.CRASHED, 1,
     "SIGKILL"),
    ("worker stopped", [FINE, running(heartbeat_age_s=16, event_age_s=16)], None, JobState.CRASHED, 1, "stopped"),
    ("worker stopped, the other one aborted", [ended(-6, 0, tail="x\ny"), running(heartbeat_age_s=22)], None,
     JobState.CRASHED, 1, "stopped"),
    ("stopped while compiling", [FINE, running(phase="compile", heartbeat_age_s=16)], None, JobState.CRASHED, 1,
     "stopped"),
    ("only the step's thread hangs", [FINE, running(event_age_s=21)], None, JobState.CRASHED, 1, "it hangs"),
    ("a long first step with signs of work", [first_step(0, idle_s=1), first_step(1, idle_s=2)], None, JobState.RUNNING,
     None, ""),
    ("a long first step on one host, the other one waits", [first_step(0, idle_s=80), first_step(1, idle_s=2)], None,
     JobState.RUNNING, None, ""),
    ("the first step hangs", [first_step(0, idle_s=21), first_step(1, idle_s=21.5)], None, JobState.CRASHED, 1,
     "the limit is 20 s (cluster.step_limit)"),
    ("a save exceeds the limit of a phase", [FINE, running(phase="save", event_age_s=601)], None, JobState.CRASHED, 1,
     "the limit is 600 s"),
    ("a long save with signs of work", [FINE, running(phase="save", event_age_s=500, idle_s=2)], None, JobState.RUNNING,
     None, ""),
    ("one saves with signs of work, the other one waits",
     [running(phase="save", worker_id=0, idle_s=3), running(phase="save", idle_s=21)], None, JobState.RUNNING, None,
     ""),
    ("a save without signs of work",
     [running(phase="save", worker_id=0, idle_s=20.5), running(phase="save", idle_s=22)], None, JobState.CRASHED, 1,
     "no sign of work for 22 s in phase save"),
    ("a validation hangs, the other one waits",
     [running(phase="validate", worker_id=0, idle_s=22), running(phase="validate", idle_s=23)], None, JobState.CRASHED,
     1, "phase validate"),
    ("a wait for data hangs, the other one waits in the step",
     [running(worker_id=0, event_age_s=23), running(phase="data", idle_s=21)], None, JobState.CRASHED, 1, "phase data"),
    ("the same, before the limit", [running(worker_id=0, event_age_s=21), running(phase="data", idle_s=19)], None,
     JobState.RUNNING, None, ""),
    ("slow data, the other one waits in the step",
     [running(worker_id=0, event_age_s=90), running(phase="data", event_age_s=90, idle_s=2)], None, JobState.RUNNING,
     None, ""),
    ("both wait for data of the driver",
     [running(worker_id=0, phase="data", event_age_s=90), running(phase="data", event_age_s=90)], None,
     JobState.RUNNING, None, ""),
    ("a step hangs, the other one is in the next phase",
     [running(worker_id=0, phase="save", event_age_s=22), running(event_age_s=22)], None, JobState.CRASHED, 1,
     "phase step"),
    ("a step hangs, the other one waits in the next phase",
     [running(worker_id=0, phase="validate", idle_s=30), running(event_age_s=22)], None, JobState.CRASHED, 1,
     "phase step"),
    ("opening the data hangs",
     [running(worker_id=0, phase="open", step=0, idle_s=21), running(phase="open", step=0, idle_s=21)], None,
     JobState.CRASHED, 0, "phase open"),
    ("the mesh forms slowly",
     [running(worker_id=0, phase="start", step=0, event_age_s=90, idle_s=19),
      running(phase="start", step=0, event_age_s=90, idle_s=18)], None, JobState.RUNNING, None, ""),
    ("a slow start of one host",
     [running(worker_id=0, phase="start", step=0, event_age_s=400, idle_s=300),
      running(phase="start", step=0, event_age_s=400, idle_s=1)], None, JobState.RUNNING, None, ""),
    ("the mesh does not form",
     [running(worker_id=0, phase="start", step=0, idle_s=21), running(phase="start", step=0, idle_s=20.5)], None,
     JobState.CRASHED, 0, "the limit is 20 s"),
    ("an evaluation hangs",
     [running(worker_id=0, phase="evaluate", step=0, idle_s=21), running(phase="evaluate", step=0, idle_s=22)], None,
     JobState.CRASHED, 1, "phase evaluate"),
    ("a long evaluation on one host with signs of work",
     [running(worker_id=0, phase="evaluate", step=0, idle_s=90), running(phase="evaluate", step=0, idle_s=3)], None,
     JobState.RUNNING, None, ""),
    ("a generation hangs",
     [running(worker_id=0, phase="generate", step=0, idle_s=21), running(phase="generate", step=0, idle_s=22)], None,
     JobState.CRASHED, 1, "phase generate"),
    ("a compilation without signs of work", [FINE, running(phase="compile", step=6, idle_s=21)], None, JobState.CRASHED,
     1, "phase compile"),
    ("a device that is slow in its steps is slow in other phases",
     [FINE, running(phase="validate", idle_s=29, slowest_step_s=10)], None, JobState.RUNNING, None, ""),
    ("the last save is in progress",
     [running(worker_id=0, phase="finish", idle_s=1), running(phase="finish", idle_s=50)], None, JobState.RUNNING, None,
     ""),
    ("the end hangs, the other one has ended", [ended(0, 0), running(phase="finish", idle_s=21)], None,
     JobState.CRASHED, 1, "phase finish"),
    ("all aborted for an unknown reason", [ended(-6, 0, tail="the last line"), ended(-6)], None, JobState.CRASHED, 0,
     "the last line"),
    ("an error of the machine", [FINE, failed("machine")], None, JobState.CRASHED, 1, "the message"),
    ("the process is gone", [FINE, Status(1, "idle")], None, JobState.CRASHED, 1, "gone"),
    ("an unknown exit code", [FINE, ended(3, tail="why")], None, JobState.CRASHED, 1, "code 3: why"),
    ("a wrong config", [FINE, failed("user", 2)], None, JobState.USER_ERROR, 1, "the message"),
    ("a user error, the other one aborted", [ended(-6, 0), failed("user", 2)], None, JobState.USER_ERROR, 1,
     "the message"),
    ("a user error on a preempted slice", [FINE, failed("user", 2)], "PREEMPTED", JobState.USER_ERROR, 1,
     "the message"),
    ("a bug", [FINE, failed("bug")], None, JobState.USER_ERROR, 1, "the traceback"),
    ("a bug, the other one aborted", [ended(-6, 0), failed("bug")], None, JobState.USER_ERROR, 1, "the traceback"),
    ("the loss is not finite", [FINE, failed("run")], None, JobState.RUN_ERROR, 1, "the message"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "statuses", "slice_state", "state", "worker", "reason"), TABLE, ids=[row[0] for row in TABLE]
)
def test_verdict(name, statuses, slice_state, state, worker, reason):
    verdict = classify(statuses, slice_state, LIMITS)
    assert (verdict.state, verdict.worker_id) == (state, worker)
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
        (["ConnectionResetError", "ConnectionError", "OSError", "Exception"], "reset", "machine"),
        (["RuntimeError", "Exception"], "something", "machine"),
    ],
)
def test_category_of_an_error(types, message, expected):
    assert category(types, message) == expected
