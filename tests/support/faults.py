"""Real faults of a pod, between two checkpoints, and the time of each recovery."""

from collections.abc import Callable
from dataclasses import dataclass

from support.driving import Driver, redone, stop_main_thread
from support.gate import Gate
from support.pod_driver import TPU, PodDrivers
from support.waiting import until

# steps between checkpoints
EVERY = 24
# the step after a checkpoint before which a fault happens
MIDDLE = 7
DRIVER_KILLED = "driver killed"


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        cause: causes the fault.
        reasons: the driver must log one of them.
        repair: called after the driver has detected the fault.
        redone: whether steps must be repeated.
    """

    name: str
    cause: Callable[[PodDrivers], None]
    reasons: tuple[str, ...]
    repair: Callable[[PodDrivers], None] = lambda drivers: None
    redone: bool = True


@dataclass(frozen=True)
class Recovery:
    """Measurements of a recovery, from the times of the driver's lines."""

    fault: str
    at_step: int
    detected_after_s: float
    # after the detection; for a driver: from its new start until it has found the workers
    next_step_after_s: float
    steps_redone: int
    line: str


def _stop_all(drivers: PodDrivers) -> None:
    drivers.api.preempt(TPU)
    for i in range(drivers.hosts.count):
        drivers.hosts.stop(i)


def _start_all(drivers: PodDrivers) -> None:
    for i in range(drivers.hosts.count):
        drivers.hosts.start(i)


def _stop_second_of_two_slices(drivers: PodDrivers) -> None:
    drivers.api.preempt(f"{TPU}-1")
    for i in (2, 3):
        drivers.hosts.stop(i)


def _start_both_slices(drivers: PodDrivers) -> None:
    """The first slice ends when the queued resource is deleted. Both come back."""
    until(lambda: "DeleteQueuedResource" in drivers.api.calls)
    for i in (0, 1):
        drivers.hosts.stop(i)
    _start_all(drivers)


SLICE_PREEMPTED = Fault(
    "one of two slices preempted", _stop_second_of_two_slices, ("the slice is PREEMPTED",), _start_both_slices
)
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("worker killed", lambda d: d.signal(1, d.worker(1), "KILL"), ("killed by SIGKILL",)),
        Fault("worker stopped", lambda d: d.signal(3, d.worker(3), "STOP"), ("has stopped",)),
        Fault("job's thread stopped", lambda d: stop_main_thread(d.outside(1, d.worker(1))), ("it hangs",)),
        Fault("raylet killed", lambda d: d.signal(2, d.raylet(2), "KILL"), ("its agent has died", "its host")),
        Fault("agent killed", lambda d: d.signal(2, d.agent(2), "KILL"), ("its agent has died",), redone=False),
        Fault("head of Ray killed", lambda d: d.kill_head(), ("the head of the Ray cluster",)),
        Fault(
            "link down",
            lambda d: d.hosts.link(2, up=False),
            ("its agent has died", "its host"),
            lambda d: d.hosts.link(2, up=True),
        ),
        Fault(
            "host lost power",
            lambda d: d.hosts.stop(3),
            ("its agent has died", "its host"),
            lambda d: d.hosts.start(3),
        ),
        Fault("slice preempted", _stop_all, ("the slice is PREEMPTED",), _start_all),
        Fault(
            "SIGTERM on a host",
            lambda d: d.signal(2, d.worker(2), "TERM"),
            ("because of a signal",),
            redone=False,
        ),
    )
}


def middle(number: int) -> int:
    """The step of the fault in interval `number` (1 or more) between checkpoints."""
    return number * EVERY + MIDDLE


def recover_from(drivers: PodDrivers, run: Driver, gate: Gate, fault: Fault, number: int) -> Recovery:
    """Cause a fault in interval `number` of a run that holds there, and wait until it trains again. Then it holds in
    the next interval."""
    gate.wait(run, range(drivers.hosts.count))
    step = middle(number)
    before, when = redone(run.folder), run.now
    fault.cause(drivers)
    gate.hold(middle(number + 1))
    seen = run.wait_for_line(" at step ", when)
    line = next(line for at, line in run.lines if at == seen and " at step " in line)
    assert any(part in line for part in fault.reasons), (fault.name, line)
    fault.repair(drivers)
    again = run.wait_for_line("recovered", seen)
    run.wait_for_step(step + 1)
    lost = redone(run.folder) - before
    assert (lost > 0) == fault.redone, (fault.name, lost)
    return Recovery(fault.name, step, round(seen - when, 1), round(again - seen, 1), lost, line)


def kill_driver(
    drivers: PodDrivers, run: Driver, gate: Gate, number: int, start: Callable[[], Driver]
) -> tuple[Driver, Recovery]:
    """kill -9 of the driver of a run that holds in interval `number`. `start` starts the same command, which finds the
    same processes. Then the run holds in the next interval."""
    gate.wait(run, range(drivers.hosts.count))
    step, before = middle(number), redone(run.folder)
    pids = [drivers.worker(i) for i in range(drivers.hosts.count)]
    drivers.kill(run)
    again = start()
    seconds = again.wait_for_line("continuing with the running workers", 0)
    gate.hold(middle(number + 1))
    assert [drivers.worker(i) for i in range(drivers.hosts.count)] == pids
    again.wait_for_step(step + 1)
    lost = redone(run.folder) - before
    assert lost == 0
    return again, Recovery(DRIVER_KILLED, step, 0.0, round(seconds, 1), lost, "continuing with the running workers")
