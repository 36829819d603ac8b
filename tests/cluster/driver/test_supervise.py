"""The reaction of the supervisor to each state of a job, on a fake cluster with a fake clock."""

import signal

import pytest
from support.commands import CONFIG
from support.fake_cluster import Clock, FakeCluster, FakeHosts

from mesh_transformer.cluster.base import Job, Status, WorkerError
from mesh_transformer.cluster.driver.supervise import Supervisor
from mesh_transformer.config import parse_config
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.stop_signals import StopSignals

JOB = Job.of("train", parse_config({**CONFIG, "cluster": {"max_crashes": 3}}))


def running(step, start_step=0, **facts):
    return [
        Status(
            i, "running", phase="step", step=step, job_key=JOB.key,
            start_point={"step": start_step, "total": 99, "steps_redone": 0, "chips": 2}, **facts,
        )
        for i in range(2)
    ]  # fmt: skip


def finishes(seconds):
    return running(1) if seconds < 5 else [Status(i, "ended", exit_code=0) for i in range(2)]


def dies(start_step=0, code=-9):
    """Worker 1 is killed after five seconds."""

    def life(seconds):
        return (
            running(1, start_step) if seconds < 5 else [running(1, start_step)[0], Status(1, "ended", exit_code=code)]
        )

    return life


def supervisor(lives, hosts=None, job=JOB, stop=None, **cluster):
    clock = Clock()
    fake = FakeCluster(lives, clock, **cluster)
    return Supervisor(fake, job, hosts=hosts, stop=stop, clock=clock, sleep=clock.sleep), fake


def test_a_job_without_failures():
    driver, fake = supervisor([finishes])
    fake.events = [
        (1, {"kind": "result", "value": "of worker 1"}),
        (0, {"kind": "result", "value": "of worker 0"}),
    ]
    assert driver.run() == (0, "of worker 0")
    assert fake.calls == ["attach", "start"]


def test_a_crash_ends_all_processes_and_starts_new_ones():
    driver, fake = supervisor([dies(), finishes])
    assert driver.run()[0] == 0
    assert fake.calls == ["attach", "start", "kill", "attach", "start"]
    assert (driver.crashes, driver.preemptions) == (1, 0)


def test_crashes_in_a_row_have_growing_pauses_and_a_limit():
    driver, fake = supervisor([dies()] * 9)
    with pytest.raises(RunError, match=r"4 crashes without a newer checkpoint.*worker 1: .*SIGKILL"):
        driver.run()
    pauses = [b - a for a, b in zip(fake.starts, fake.starts[1:], strict=False)]
    assert len(fake.starts) == 4
    assert pauses[1] - pauses[0] == pytest.approx(1)
    assert pauses[2] - pauses[1] == pytest.approx(2)
    assert fake.calls[-1] == "kill"


def test_a_newer_checkpoint_resets_the_count_of_crashes():
    lives = [dies(0), dies(0), dies(0), dies(10), dies(10), dies(20), finishes]
    driver, fake = supervisor(lives)
    assert driver.run()[0] == 0
    assert driver.crashes == 6


def test_preemptions_are_no_crashes():
    hosts = FakeHosts()

    def preempted(seconds):
        if seconds >= 5:
            hosts.state = "PREEMPTED"
        return [running(1)[0], running(1, answer_age_s=max(0.0, seconds - 5))[1]]

    driver, fake = supervisor([preempted] * 5 + [finishes], hosts=hosts)
    assert driver.run()[0] == 0
    assert (driver.crashes, driver.preemptions, hosts.recreated) == (0, 5, 5)


def test_a_crash_on_a_living_host_recreates_no_host():
    hosts = FakeHosts()
    driver, _ = supervisor([dies(), finishes], hosts=hosts)
    driver.run()
    assert hosts.recreated == 0


def test_a_lost_host_is_recreated():
    hosts = FakeHosts()

    def life(seconds):
        gone = {"lost": "its agent has died", "host_alive": False} if seconds > 5 else {}
        return [running(1)[0], running(1, **gone)[1]]

    driver, fake = supervisor([life, finishes], hosts=hosts, missing=[7])
    assert driver.run()[0] == 0
    assert hosts.recreated == 1
    assert fake.starts[1] - fake.starts[0] > 7


def test_hosts_that_stay_missing_are_recreated():
    """A slice may be preempted while the driver waits for its hosts."""
    hosts = FakeHosts()
    driver, _ = supervisor([dies(), finishes], hosts=hosts, missing=[100])
    assert driver.run()[0] == 0
    assert hosts.recreated == 1


def test_a_restart_after_a_preemption_notice_is_no_crash():
    def notified(seconds):
        return running(1) if seconds < 5 else [Status(i, "ended", exit_code=143) for i in range(2)]

    driver, fake = supervisor([notified, finishes])
    assert driver.run()[0] == 0
    assert (driver.crashes, driver.preemptions) == (0, 1)


def test_workers_that_save_are_not_killed():
    """After the death of an agent all workers save after the same step. The driver waits for that."""

    def life(seconds):
        dead = Status(1, "running", lost="its agent has died", host_alive=True)
        if seconds < 5:
            return running(1)
        if seconds < 30:
            return [Status(0, "running", phase="finish", step=5), dead]
        return [Status(0, "ended", exit_code=143), dead]

    driver, fake = supervisor([life, finishes])
    assert driver.run()[0] == 0
    assert fake.starts[1] >= 30


def test_the_driver_does_not_wait_for_a_worker_that_hangs_at_the_end():
    """It does not save any more."""

    def life(seconds):
        if seconds < 5:
            return running(1)
        return [
            Status(0, "ended", exit_code=0),
            Status(1, "running", phase="finish", step=5, idle_s=seconds - 5),
        ]

    driver, fake = supervisor([life, finishes])
    assert driver.run()[0] == 0
    assert 25 <= fake.starts[1] <= 35


def inactive(phase, until, then=finishes):
    """Both workers show no sign of work in a phase until a time, and continue normally."""

    def life(seconds):
        if seconds >= until:
            return then(seconds - until)
        return [Status(i, "running", phase=phase, step=0, idle_s=seconds) for i in range(2)]

    return life


@pytest.mark.parametrize("phase", ["start", "open", "compile", "step", "evaluate", "generate"])
def test_a_slow_start_loses_only_its_first_attempts(phase):
    """It looks like a hang, which must be detected within 30 s. So the limit doubles with each attempt."""
    driver, fake = supervisor([inactive(phase, 70)] * 3)
    assert driver.run()[0] == 0
    assert driver.crashes == 2
    first, second, third = fake.starts
    assert second - first < 30
    assert 40 < third - second < 50


def hangs(start_step):
    """A step that never ends, after steps of a second."""

    def life(seconds):
        event_age_s = max(0.0, seconds - 5)
        return running(start_step + 7, start_step, event_age_s=event_age_s, slowest_step_s=1.0)

    return life


def test_a_hang_after_a_completed_step_is_detected_at_the_normal_limit():
    """A completed step resets the limit that a slow start has raised, with or without a newer checkpoint."""
    lives = [inactive("start", 30, hangs(0)), inactive("start", 30, hangs(0)), hangs(0), hangs(1), finishes]
    driver, fake = supervisor(lives)
    assert driver.run()[0] == 0
    lasted = [b - a for a, b in zip(fake.starts, fake.starts[1:], strict=False)]
    assert lasted[0] < 30
    assert 30 + 5 + 21 < lasted[1] < 30 + 5 + 21 + 10
    # at the same step
    assert lasted[2] > 5 + 41
    assert 5 + 21 < lasted[3] < 5 + 21 + 15


def test_slow_first_steps_are_tolerated_until_one_is_timed():
    """The first two steps count as phase compile."""

    def three_slow_steps(seconds):
        number = int(seconds // 30)
        phases = ["compile", "compile", "step"]
        if number >= len(phases):
            return finishes(seconds - 90)
        return [Status(i, "running", phase=phases[number], step=number + 1, idle_s=seconds % 30) for i in range(2)]

    driver, _ = supervisor([three_slow_steps] * 2)
    assert driver.run()[0] == 0
    assert driver.crashes == 1


def test_the_time_of_a_step_is_known_to_the_next_processes():
    """Their first step may take that time plus the limit."""

    def dies_with_slow_steps(seconds):
        return running(1, slowest_step_s=60.0) if seconds < 5 else dies()(seconds)

    driver, fake = supervisor([dies_with_slow_steps, inactive("step", 75)])
    assert driver.run()[0] == 0
    assert driver.crashes == 1


@pytest.mark.parametrize(("kind", "error"), [("user", UserError), ("run", RunError), ("bug", UserError)])
def test_a_user_error_ends_the_run_at_once(kind, error):
    def life(seconds):
        if seconds < 5:
            return running(1)
        return [
            running(1)[0],
            Status(1, "ended", exit_code=1, error=WorkerError(kind, "the reason", "Traceback: the reason")),
        ]

    driver, fake = supervisor([life] * 3)
    with pytest.raises(error, match="the reason"):
        driver.run()
    assert fake.calls == ["attach", "start", "kill"]
    assert fake.clock.now < 10


def test_the_cause_may_appear_after_its_consequences():
    """Worker 0 fails because of worker 1, whose error arrives a second later."""

    def life(seconds):
        if seconds < 5:
            return running(1)
        late = {"error": WorkerError("user", "the cause", "")} if seconds > 6 else {}
        return [Status(0, "ended", exit_code=-6), Status(1, "ended", exit_code=2, **late)]

    driver, _ = supervisor([life] * 3)
    with pytest.raises(UserError, match="worker 1: the cause"):
        driver.run()


@pytest.mark.parametrize(("comes_back", "cause"), [(False, "worker 1: its host"), (True, "worker 0: Gloo")])
def test_a_host_that_does_not_answer_is_the_cause_of_the_others_errors(comes_back, cause, caplog):
    """The collective of worker 0 fails at once. The loss of worker 1's host is known later."""

    def life(seconds):
        if seconds < 5:
            return running(1)
        failed = Status(0, "ended", exit_code=1, error=WorkerError("machine", "Gloo all-reduce failed", ""))
        answer_age_s = 0.0 if comes_back and seconds > 9 else seconds - 4
        return [failed, running(1, answer_age_s=answer_age_s)[1]]

    driver, fake = supervisor([life, finishes])
    assert driver.run()[0] == 0
    (message,) = [record.getMessage() for record in caplog.records if "crash at step" in record.getMessage()]
    assert cause in message
    assert fake.starts[1] < (12 if comes_back else 21)


def test_a_second_driver_continues_with_the_running_workers():
    driver, fake = supervisor([finishes], found=running(3))
    # the start by the previous driver
    fake.starts.append(0.0)
    assert driver.run()[0] == 0
    assert fake.calls == ["attach"]


def test_a_driver_with_another_config_lets_the_workers_save_first():
    other = Job.of("train", parse_config({**CONFIG, "optimizer": {**CONFIG["optimizer"], "lr": 1e-3}}))
    found = running(3)
    driver, fake = supervisor([finishes], found=found, job=other)
    fake.found = found
    stop = fake.stop

    def stops():
        stop()
        fake.found = [Status(i, "ended", exit_code=143) for i in range(2)]

    fake.stop = stops
    assert driver.run()[0] == 0
    assert fake.calls == ["attach", "stop", "start"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_saves_and_ends(number):
    stop = StopSignals()

    def life(seconds):
        if seconds > 5:
            stop.received = number
        if fake.asked_to_stop and seconds > 9:
            return [Status(i, "ended", exit_code=143) for i in range(2)]
        return running(1)

    driver, fake = supervisor([life], stop=stop)
    assert driver.run() == (128 + number, None)
    assert fake.calls == ["attach", "start", "stop", "kill"]
