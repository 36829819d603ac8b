"""What the supervisor does about each verdict, on a cluster that is a table and a clock that does not tick by itself."""

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


def at_work(step, start_step=0, **facts):
    return [
        Status(
            i, "running", phase="step", step=step, job_key=JOB.key,
            start_point={"step": start_step, "total": 99, "steps_redone": 0, "chips": 2}, **facts,
        )
        for i in range(2)
    ]  # fmt: skip


def finishes(seconds):
    return at_work(1) if seconds < 5 else [Status(i, "ended", exit_code=0) for i in range(2)]


def dies(start_step=0, code=-9):
    """Worker 1 is killed after five seconds."""

    def life(seconds):
        return (
            at_work(1, start_step)
            if seconds < 5
            else [at_work(1, start_step)[0], Status(1, "ended", exit_code=code)]
        )

    return life


def supervisor(lives, hosts=None, job=JOB, stop=None, **cluster):
    clock = Clock()
    fake = FakeCluster(lives, clock, **cluster)
    return Supervisor(fake, job, hosts=hosts, stop=stop, clock=clock, sleep=clock.sleep), fake


def test_a_job_without_trouble():
    made, fake = supervisor([finishes])
    fake.events = [
        (1, {"kind": "result", "value": "of worker 1"}),
        (0, {"kind": "result", "value": "of worker 0"}),
    ]
    assert made.run() == (0, "of worker 0")
    assert fake.calls == ["attach", "start"]


def test_a_crash_ends_everything_and_begins_again():
    made, fake = supervisor([dies(), finishes])
    assert made.run()[0] == 0
    assert fake.calls == ["attach", "start", "kill", "attach", "start"]
    assert (made.crashes, made.preemptions) == (1, 0)


def test_crashes_in_a_row_wait_longer_each_time_and_end():
    made, fake = supervisor([dies()] * 9)
    with pytest.raises(RunError, match=r"4 crashes without a newer checkpoint.*worker 1: .*SIGKILL"):
        made.run()
    pauses = [b - a for a, b in zip(fake.starts, fake.starts[1:], strict=False)]
    assert len(fake.starts) == 4
    assert pauses[1] - pauses[0] == pytest.approx(1)
    assert pauses[2] - pauses[1] == pytest.approx(2)
    assert fake.calls[-1] == "kill"


def test_a_newer_checkpoint_forgives_crashes():
    lives = [dies(0), dies(0), dies(0), dies(10), dies(10), dies(20), finishes]
    made, fake = supervisor(lives)
    assert made.run()[0] == 0
    assert made.crashes == 6


def test_preemptions_are_no_crashes():
    hosts = FakeHosts()

    def taken(seconds):
        if seconds >= 5:
            hosts.named = "PREEMPTED"
        return [at_work(1)[0], at_work(1, answer_age_s=max(0.0, seconds - 5))[1]]

    made, fake = supervisor([taken] * 5 + [finishes], hosts=hosts)
    assert made.run()[0] == 0
    assert (made.crashes, made.preemptions, hosts.recreated) == (0, 5, 5)


def test_a_crash_on_a_host_that_is_there_remakes_nothing():
    hosts = FakeHosts()
    made, _ = supervisor([dies(), finishes], hosts=hosts)
    made.run()
    assert hosts.recreated == 0


def test_a_lost_host_is_made_again_and_waited_for():
    hosts = FakeHosts()

    def life(seconds):
        gone = {"lost": "its agent has died", "host_alive": False} if seconds > 5 else {}
        return [at_work(1)[0], at_work(1, **gone)[1]]

    made, fake = supervisor([life, finishes], hosts=hosts, missing=[7])
    assert made.run()[0] == 0
    assert hosts.recreated == 1
    assert fake.starts[1] - fake.starts[0] > 7


def test_hosts_that_do_not_come_are_made_once_more():
    """A slice may be taken while its hosts are waited for."""
    hosts = FakeHosts()
    made, _ = supervisor([dies(), finishes], hosts=hosts, missing=[100])
    assert made.run()[0] == 0
    assert hosts.recreated == 1


def test_a_notice_begins_again_without_a_crash():
    def told(seconds):
        return at_work(1) if seconds < 5 else [Status(i, "ended", exit_code=143) for i in range(2)]

    made, fake = supervisor([told, finishes])
    assert made.run()[0] == 0
    assert (made.crashes, made.preemptions) == (0, 1)


def test_workers_that_save_are_not_killed():
    """A dead agent's worker and the others save after the same step: that is waited for."""

    def life(seconds):
        dead = Status(1, "running", lost="its agent has died", host_alive=True)
        if seconds < 5:
            return at_work(1)
        if seconds < 30:
            return [Status(0, "running", phase="finish", step=5), dead]
        return [Status(0, "ended", exit_code=143), dead]

    made, fake = supervisor([life, finishes])
    assert made.run()[0] == 0
    assert fake.starts[1] >= 30


def test_a_worker_that_hangs_at_the_end_is_not_waited_for():
    """It is not saving any more."""

    def life(seconds):
        if seconds < 5:
            return at_work(1)
        return [
            Status(0, "ended", exit_code=0),
            Status(1, "running", phase="finish", step=5, idle_s=seconds - 5),
        ]

    made, fake = supervisor([life, finishes])
    assert made.run()[0] == 0
    assert 25 <= fake.starts[1] <= 35


def quiet(phase, until, then=finishes):
    """Both workers do nothing in a phase for a while, and go on as if nothing had been."""

    def life(seconds):
        if seconds >= until:
            return then(seconds - until)
        return [Status(i, "running", phase=phase, step=0, idle_s=seconds) for i in range(2)]

    return life


@pytest.mark.parametrize("phase", ["start", "open", "compile", "step", "evaluate", "generate"])
def test_a_healthy_slow_start_loses_only_its_first_tries(phase):
    """Nobody can tell it from a hang, which must be found within 30 s: each further attempt may take twice as long."""
    made, fake = supervisor([quiet(phase, 70)] * 3)
    assert made.run()[0] == 0
    assert made.crashes == 2
    first, second, third = fake.starts
    assert second - first < 30
    assert 40 < third - second < 50


def hangs(start_step):
    """A step that never ends, after steps of a second."""

    def life(seconds):
        event_age_s = max(0.0, seconds - 5)
        return at_work(start_step + 7, start_step, event_age_s=event_age_s, slowest_step_s=1.0)

    return life


def test_a_hang_past_the_last_one_is_found_as_soon_as_the_first():
    """What was allowed for a slow start is so no more once steps are done, with or without a newer checkpoint."""
    lives = [quiet("start", 30, hangs(0)), quiet("start", 30, hangs(0)), hangs(0), hangs(1), finishes]
    made, fake = supervisor(lives)
    assert made.run()[0] == 0
    lasted = [b - a for a, b in zip(fake.starts, fake.starts[1:], strict=False)]
    assert lasted[0] < 30
    assert 30 + 5 + 21 < lasted[1] < 30 + 5 + 21 + 10
    assert lasted[2] > 5 + 41  # at the same step
    assert 5 + 21 < lasted[3] < 5 + 21 + 15


def test_slow_first_steps_are_let_until_one_of_them_was_timed():
    """The first two count as compiling."""

    def three_slow_steps(seconds):
        number = int(seconds // 30)
        phases = ["compile", "compile", "step"]
        if number >= len(phases):
            return finishes(seconds - 90)
        return [
            Status(i, "running", phase=phases[number], step=number + 1, idle_s=seconds % 30) for i in range(2)
        ]

    made, _ = supervisor([three_slow_steps] * 2)
    assert made.run()[0] == 0
    assert made.crashes == 1


def test_how_long_a_step_takes_is_known_to_the_next_processes():
    """Its first step may take as long, and the usual limit longer."""

    def dies_with_slow_steps(seconds):
        return at_work(1, slowest_step_s=60.0) if seconds < 5 else dies()(seconds)

    made, fake = supervisor([dies_with_slow_steps, quiet("step", 75)])
    assert made.run()[0] == 0
    assert made.crashes == 1


@pytest.mark.parametrize(("kind", "error"), [("user", UserError), ("run", RunError), ("bug", UserError)])
def test_the_users_error_stops_at_once(kind, error):
    def life(seconds):
        if seconds < 5:
            return at_work(1)
        return [at_work(1)[0], Status(1, "ended", exit_code=1, error=WorkerError(kind, "why it was", "Traceback: why it was"))]  # fmt: skip

    made, fake = supervisor([life] * 3)
    with pytest.raises(error, match="why it was"):
        made.run()
    assert fake.calls == ["attach", "start", "kill"]
    assert fake.clock.now < 10


def test_the_cause_is_found_after_its_consequences():
    """Worker 0 fails because of worker 1, whose own error is seen a second later."""

    def life(seconds):
        if seconds < 5:
            return at_work(1)
        late = {"error": WorkerError("user", "the cause", "")} if seconds > 6 else {}
        return [Status(0, "ended", exit_code=-6), Status(1, "ended", exit_code=2, **late)]

    made, _ = supervisor([life] * 3)
    with pytest.raises(UserError, match="worker 1: the cause"):
        made.run()


@pytest.mark.parametrize(("comes_back", "cause"), [(False, "worker 1: its host"), (True, "worker 0: Gloo")])
def test_a_host_that_does_not_answer_is_the_cause_of_the_others_errors(comes_back, cause, caplog):
    """Worker 0's collective fails at once; that worker 1's host has gone is known only after a while."""

    def life(seconds):
        if seconds < 5:
            return at_work(1)
        failed = Status(0, "ended", exit_code=1, error=WorkerError("machine", "Gloo all-reduce failed", ""))
        answer_age_s = 0.0 if comes_back and seconds > 9 else seconds - 4
        return [failed, at_work(1, answer_age_s=answer_age_s)[1]]

    made, fake = supervisor([life, finishes])
    assert made.run()[0] == 0
    (said,) = [record.getMessage() for record in caplog.records if "crash at step" in record.getMessage()]
    assert cause in said
    assert fake.starts[1] < (12 if comes_back else 21)


def test_a_second_driver_goes_on_with_the_workers():
    made, fake = supervisor([finishes], found=at_work(3))
    fake.starts.append(0.0)  # by the driver before
    assert made.run()[0] == 0
    assert fake.calls == ["attach"]


def test_a_driver_with_another_config_lets_the_workers_save_first():
    other = Job.of("train", parse_config({**CONFIG, "optimizer": {**CONFIG["optimizer"], "lr": 1e-3}}))
    found = at_work(3)
    made, fake = supervisor([finishes], found=found, job=other)
    fake.found = found
    stop = fake.stop

    def stops():
        stop()
        fake.found = [Status(i, "ended", exit_code=143) for i in range(2)]

    fake.stop = stops
    assert made.run()[0] == 0
    assert fake.calls == ["attach", "stop", "start"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(number):
    stop = StopSignals()

    def life(seconds):
        if seconds > 5:
            stop.received = number
        if fake.asked_to_stop and seconds > 9:
            return [Status(i, "ended", exit_code=143) for i in range(2)]
        return at_work(1)

    made, fake = supervisor([life], stop=stop)
    assert made.run() == (128 + number, None)
    assert fake.calls == ["attach", "start", "stop", "kill"]
