"""Detection of progress, with a simulated clock. docs/reliability.md has measurements of a real waiting process."""

import pytest
from support.fake_engine import FakeEngine

from mesh_transformer import files, liveness, logs
from mesh_transformer.infer.requests import SamplingParams
from mesh_transformer.infer.scheduler import Scheduler
from mesh_transformer.liveness import MIN_CORES, SERVICE_S, WINDOW_S, Watch


class Process:
    """Simulated time and CPU time."""

    def __init__(self) -> None:
        self.now = self.used = 0.0
        self.waits = False

    def watch(self) -> Watch:
        return Watch(lambda: self.now, lambda: self.used, lambda: self.waits)

    def live(self, seconds: float, share: float) -> None:
        self.now += seconds
        self.used += share * seconds


@pytest.fixture
def process():
    return Process()


@pytest.mark.parametrize(("share", "seen"), [(0.003, False), (0.5 * MIN_CORES, False), (2 * MIN_CORES, True)])
def test_cpu_time(process, share, seen):
    watch = process.watch()
    for _ in range(3):
        process.live(WINDOW_S, share)
        assert watch.at_work() is seen


def test_a_burst_counts_once(process):
    watch = process.watch()
    process.live(WINDOW_S, 0.5)
    assert watch.at_work()
    process.live(WINDOW_S, 0)
    assert not watch.at_work()


def test_a_window_is_not_judged_before_its_end(process):
    """In a short window, a heartbeat would use a large share of the time."""
    watch = process.watch()
    process.live(WINDOW_S / 10, 0.5)
    assert not watch.at_work()


def test_a_thread_that_waits_for_a_disk(process):
    watch = process.watch()
    process.live(WINDOW_S, 0)
    process.waits = True
    assert watch.at_work()


def test_progress_is_recorded(process):
    watch, progress = process.watch(), logs.Progress("validating", 3, unit="batch", quiet=True)
    progress.update(1)
    assert watch.at_work()
    assert not watch.at_work()


def test_a_service_call_counts_for_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(liveness.time, "monotonic", lambda: now[0])
    watch = Watch(lambda: now[0], lambda: 0.0, lambda: False)
    with files.remote_call("gs://bucket/run"):
        now[0] = SERVICE_S - 1
        assert watch.at_work()
        now[0] = SERVICE_S + 1
        assert not watch.at_work()
    # the end of the call is progress
    assert watch.at_work()
    with files.remote_call("folder"):
        assert not watch.at_work()


def test_this_process_computes():
    """With the default readings of `Watch`."""
    watch = Watch()
    watch._began -= WINDOW_S
    while liveness.time.process_time() - watch._used < 2 * MIN_CORES * WINDOW_S:
        pass
    assert watch.at_work()


def test_each_step_of_a_scheduler_that_runs_to_its_end(process):
    """A device may compute a step for minutes while this process waits."""
    scheduler = Scheduler(FakeEngine(slots=1), max_queue=0, max_steps=1)
    scheduler.submit(0, [1], SamplingParams(max_tokens=3))
    watch, steps = process.watch(), 0
    for _ in scheduler.run():
        assert watch.at_work()
        assert not watch.at_work()
        steps += 1
    assert steps > 1
