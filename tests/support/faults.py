"""Real faults of a pod, between two checkpoints, and the time of each recovery."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from support.driving import Driver, redone, stop_main_thread
from support.pod_driver import TPU, PodDrivers

# steps between checkpoints
EVERY = 24
# range of the steps after a checkpoint at which a fault happens
MIDDLE = (6, 18)
WAIT_S = 150.0
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
    deadline = time.monotonic() + WAIT_S
    while "DeleteQueuedResource" not in drivers.api.calls:
        assert time.monotonic() < deadline
        time.sleep(0.05)
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


def recover_from(drivers: PodDrivers, run: Driver, fault: Fault, number: int) -> Recovery:
    """Cause a fault in interval `number` (1 or more) of a run, and wait until it trains again."""
    step = wait_for_middle(run, number)
    before, when = redone(run.folder), run.now
    fault.cause(drivers)
    seen = run.wait_for_line(" at step ", when, WAIT_S)
    line = next(line for at, line in run.lines if at == seen and " at step " in line)
    assert any(part in line for part in fault.reasons), (fault.name, line)
    fault.repair(drivers)
    again = run.wait_for_line("recovered", seen, WAIT_S)
    run.wait_for_step(step + 1, WAIT_S)
    lost = redone(run.folder) - before
    assert (lost > 0) == fault.redone, (fault.name, lost)
    return Recovery(fault.name, step, round(seen - when, 1), round(again - seen, 1), lost, line)


def kill_driver(drivers: PodDrivers, run: Driver, number: int, start: Callable[[], Driver]) -> tuple[Driver, Recovery]:
    """kill -9 of the driver. `start` starts the same command, which finds the same processes.

    Worker 1 is stopped while there is no driver, so that the run does not finish meanwhile.
    """
    step, before = wait_for_middle(run, number), redone(run.folder)
    pids = [drivers.worker(i) for i in range(drivers.hosts.count)]
    drivers.signal(1, pids[1], "STOP")
    drivers.kill(run)
    again = start()
    seconds = again.wait_for_line("continuing with the running workers", 0, WAIT_S)
    drivers.signal(1, pids[1], "CONT")
    assert [drivers.worker(i) for i in range(drivers.hosts.count)] == pids
    again.wait_for_step(step + 1)
    lost = redone(run.folder) - before
    assert lost == 0
    return again, Recovery(DRIVER_KILLED, step, 0.0, round(seconds, 1), lost, "continuing with the running workers")


def wait_for_middle(run: Driver, number: int) -> int:
    """Wait until the newest step is in the middle of interval `number` between checkpoints, or of a later one, and
    return it.

    So there is a newer checkpoint between two faults.
    """
    step = run.wait_for_step(number * EVERY + MIDDLE[0], WAIT_S)
    while not MIDDLE[0] <= step % EVERY <= MIDDLE[1]:
        step = run.wait_for_step(step + 1, WAIT_S)
    return step
