"""Real workers on a real Ray cluster of two hosts. After every failure the numbers equal those of an uninterrupted
run."""

import os
import signal
import sys
import time

import pytest
from support.driving import (
    GROUPS,
    STEPS,
    driver,
    is_running,
    kill,
    parent,
    same_numbers,
    stop_main_thread,
    wait_for_end,
    worker_pid,
    write,
)

from mesh_transformer.data.prepare import cached_records

pytestmark = [pytest.mark.slow, pytest.mark.faults]
DETECTION_S = 30
HOLD_RENAMES = """
import os
rename = os.rename
def held(source, target, **named):
    if os.path.basename(target).startswith("step_") and os.path.exists(os.environ["HELD"]):
        open(os.environ["HELD"])  # a FIFO that nobody writes to
    rename(source, target, **named)
os.rename = held
"""


@pytest.fixture
def folder(tmp_path, ray_nodes):
    """A run's folder. The locks of other runs are deleted."""
    for lock in ray_nodes.temporary.glob("mesh-transformer-*/*"):
        lock.unlink()
    write(tmp_path)
    return tmp_path


def _command(ray_nodes, *more):
    return ["--ray-address", ray_nodes.address, *more]


def test_workers_killed_stopped_and_hung(folder, ray_nodes, straight, worker_environment):
    """Three faults between checkpoints, each detected within 30 s."""
    faults = [
        (50, 1, kill, ["killed by SIGKILL"]),
        (70, 0, lambda pid: os.kill(pid, signal.SIGSTOP), ["has stopped"]),
        # if it holds the interpreter's lock, no other thread of the process can send heartbeats
        (90, 1, stop_main_thread, ["it hangs", "has stopped"]),
    ]
    with driver(folder, *_command(ray_nodes), **worker_environment) as run:
        for step, worker_id, break_it, reasons in faults:
            run.wait_for_step(step)
            pid, when = worker_pid(ray_nodes.temporary, worker_id), run.now
            break_it(pid)
            seen = _detected(run, when, reasons[0], reasons, f"worker {worker_id}: ")
            again = run.wait_for_line("recovered", when)
            sys.stdout.write(f"{reasons[0]}: the next step {again - seen:.1f} s later\n")
            assert not is_running(pid)
        errors = run.finish()
    records = same_numbers(straight, folder / "run")
    # steps are repeated after each fault
    assert len(records) - STEPS >= 3
    assert records[-1]["train/steps_redone"] == len(records) - STEPS
    assert errors.count("recovered") == 3


def test_hangs_outside_of_steps(folder, ray_nodes, straight, worker_environment, monkeypatch):
    """A worker that stops in its compilation, and a validation whose file cannot be read: each is detected within 30
    s."""
    with monkeypatch.context() as cache:
        cache.setenv("XDG_CACHE_HOME", str(folder))
        records = cached_records(str(folder / "text.txt"), GROUPS["model"]["seq"], "bytes")
    held = folder / "held.tfrecords"
    os.rename(records, held)
    write(folder, data={"val_set": {"held": held.name}})
    uncompiled = ("--env", f"JAX_COMPILATION_CACHE_DIR={folder / 'compiled'}")
    with driver(folder, *_command(ray_nodes, *uncompiled), **worker_environment) as run:
        run.wait_for_line("parameters;", 0)
        time.sleep(0.5)
        when = run.now
        stop_main_thread(worker_pid(ray_nodes.temporary, 1))
        _detected(run, when, "a worker in its compilation", ["no sign of work", "has stopped"], "worker 1: ")
        run.wait_for_step(45)
        os.rename(held, folder / "aside")
        os.mkfifo(held)
        run.wait_for_step(59)
        when = run.now
        _detected(run, when, "a validation", ["no sign of work"], "in phase validate, step 60")
        held.unlink()
        os.rename(folder / "aside", held)
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] > 0


def _detected(run, when, what, reasons, where=""):
    """The time at which the driver logs a crash after `when`, which must be within DETECTION_S."""
    seen = run.wait_for_line("worker crash", when)
    verdict = run.line_with("worker crash", when)
    assert where in verdict
    assert any(reason in verdict for reason in reasons), verdict
    sys.stdout.write(f"{what}: detected after {seen - when:.1f} s: {verdict}\n")
    assert seen - when < DETECTION_S
    return seen


def test_driver_killed_and_started_again(folder, ray_nodes, straight, worker_environment):
    """A driver that starts soon continues with the running workers. Later, the workers have saved and ended. No step is
    lost."""
    command = _command(ray_nodes, "--set", "cluster.driver_timeout=9")

    def kill_driver(run, step):
        """Stop worker 1, which is not JAX's coordinator, so that the run makes no progress without a driver."""
        run.wait_for_step(step)
        pid = worker_pid(ray_nodes.temporary, 1)
        os.kill(pid, signal.SIGSTOP)
        kill(run.process.pid)
        run.process.wait()
        return pid

    with driver(folder, *command, **worker_environment) as run:
        pid = kill_driver(run, 10)
    with driver(folder, *command, **worker_environment) as run:
        run.wait_for_line("continuing with the running workers", 0)
        os.kill(pid, signal.SIGCONT)
        assert kill_driver(run, 50) == pid
    time.sleep(10)
    os.kill(pid, signal.SIGCONT)
    wait_for_end(pid)
    with driver(folder, *command, **worker_environment) as run:
        errors = run.finish()
    assert "resuming after step" in errors
    assert len(same_numbers(straight, folder / "run")) == STEPS


def test_a_host_dies_while_the_driver_streams(folder, ray_nodes, straight, worker_environment):
    """Agent and worker die with the machine. Another machine gets its number."""
    with driver(folder, *_command(ray_nodes, "--set", "data.read_by=driver"), **worker_environment) as run:
        run.wait_for_step(50)
        when = run.now
        ray_nodes.ask("kill 1")
        seen = run.wait_for_line("preemption at step", when)
        assert seen - when < DETECTION_S
        run.wait_for_line("waiting for hosts", when)
        ray_nodes.ask("add 1")
        back = run.now
        again = run.wait_for_line("recovered", when)
        sys.stdout.write(
            f"host gone: detected after {seen - when:.1f} s, the next step {again - back:.1f} s after it was back\n"
        )
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] > 0


def test_agents_killed_and_stopped(folder, ray_nodes, straight, worker_environment):
    """The worker of a killed agent saves and ends. That of a stopped agent is killed with it."""
    faults = [
        (50, 1, kill, ["its agent has died"]),
        (90, 0, lambda pid: os.kill(pid, signal.SIGSTOP), ["has not answered"]),
    ]
    with driver(folder, *_command(ray_nodes), **worker_environment) as run:
        for step, worker_id, break_it, reasons in faults:
            run.wait_for_step(step)
            worker = worker_pid(ray_nodes.temporary, worker_id)
            agent, when = parent(worker), run.now
            break_it(agent)
            # otherwise the run would finish before the detection
            if worker_id == 0:
                os.kill(worker_pid(ray_nodes.temporary, 1), signal.SIGSTOP)
            seen = _detected(run, when, f"agent: {reasons[0]}", reasons, f"worker {worker_id}: ")
            again = run.wait_for_line("recovered", when)
            sys.stdout.write(f"agent: the next step {again - seen:.1f} s later\n")
            assert not is_running(agent)
            assert not is_running(worker)
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] > 0


def test_the_head_of_ray_dies_while_the_driver_streams(folder, ray_nodes, straight, worker_environment):
    """All its nodes die too. The driver waits for a new head at the same address, and for its nodes."""
    with driver(folder, *_command(ray_nodes, "--set", "data.read_by=driver"), **worker_environment) as run:
        run.wait_for_step(50)
        pids, when = [worker_pid(ray_nodes.temporary, i) for i in range(2)], run.now
        ray_nodes.ask("kill head")
        seen = _detected(run, when, "head", ["the head of the Ray cluster"])
        run.wait_for_line("waiting for hosts", when)
        assert not any(map(is_running, pids))
        ray_nodes.ask("add head")
        back = run.now
        again = run.wait_for_line("recovered", seen)
        sys.stdout.write(f"head: the next step {again - back:.1f} s after it was back\n")
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] > 0


def test_a_save_hangs(folder, ray_nodes, straight, worker_environment):
    """The rename that completes a checkpoint never returns, in a thread of worker 0. Training continues until the next
    save."""
    os.mkfifo(folder / "held")
    (folder / "sitecustomize.py").write_text(HOLD_RENAMES)
    hold = (
        "--env",
        f"PYTHONPATH={folder}",
        "--env",
        f"HELD={folder / 'held'}",
        "--set",
        "cluster.step_limit=10",
    )
    with driver(folder, *_command(ray_nodes, *hold), **worker_environment) as run:
        run.wait_for_step(79)
        when = run.now
        _detected(run, when, "a save", ["no sign of work"], "in phase save, step 80")
        (folder / "held").unlink()
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] == 79
