"""Real workers on a real Ray cluster of two hosts. After every failure the numbers equal those of an uninterrupted
run."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.driving import (
    GROUPS,
    STEPS,
    driver,
    is_running,
    kill,
    parent,
    redone,
    same_numbers,
    stop_main_thread,
    wait_for_end,
    worker_pid,
    write,
)

from mesh_transformer.data.prepare import cached_records
from mesh_transformer.data.text_counts import cached_counts

pytestmark = pytest.mark.faults
DETECTION_S = 30
# for hangs, which are detected after this time without a sign of work; the default is 20 s
STEP_LIMIT_S = 10
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


def test_workers_and_agents_killed_stopped_and_hung(folder, ray_nodes, straight, worker_environment):
    """Five faults between checkpoints, each detected within 30 s.

    The worker of a killed agent saves and ends, some twenty steps later: this comes first, so that the run does not end
    before the next fault. The worker of a stopped agent is killed with it.
    """
    faults = [
        (75, 1, kill, ["killed by SIGKILL"]),
        (85, 0, _stop, ["has stopped"]),
        # if it holds the interpreter's lock, no other thread of the process can send heartbeats
        (95, 1, stop_main_thread, ["it hangs", "has stopped"]),
    ]
    with driver(folder, *_command(ray_nodes), **worker_environment) as run:
        _break_agent(run, ray_nodes, 45, 1, kill, "its agent has died")
        for step, worker_id, break_it, reasons in faults:
            run.wait_for_step(step)
            pid, when = worker_pid(ray_nodes.temporary, worker_id), run.now
            break_it(pid)
            seen = _detected(run, when, reasons[0], reasons, f"worker {worker_id}: ")
            _recovered(run, reasons[0], seen)
            assert not is_running(pid)
        _break_agent(run, ray_nodes, 105, 0, _stop, "has not answered")
        errors = run.finish()
    records = same_numbers(straight, folder / "run")
    # steps are repeated after each fault but that of the killed agent
    assert len(records) - STEPS >= 4
    assert records[-1]["train/steps_redone"] == len(records) - STEPS
    assert errors.count("recovered") == len(faults) + 2


def _break_agent(run, ray_nodes, step, worker_id, break_it, reason):
    """Break the agent of a worker at a step, and wait until the run goes on."""
    run.wait_for_step(step)
    worker = worker_pid(ray_nodes.temporary, worker_id)
    agent, when = parent(worker), run.now
    break_it(agent)
    # otherwise the run would finish before the detection
    if break_it is _stop:
        _stop(worker_pid(ray_nodes.temporary, 1 - worker_id))
    seen = _detected(run, when, f"agent: {reason}", [reason], f"worker {worker_id}: ")
    _recovered(run, "agent", seen)
    assert not is_running(agent)
    assert not is_running(worker)


def test_hangs_outside_of_steps(folder, ray_nodes, straight, worker_environment, monkeypatch):
    """Three hangs. Each is detected within the limit and ten seconds.

    - a worker stops in its compilation
    - the file of a validation set cannot be read
    - the rename that completes a checkpoint never returns, in a thread of worker 0: training continues until the next
      save
    """
    with monkeypatch.context() as cache:
        cache.setenv("XDG_CACHE_HOME", str(folder))
        records = cached_records(str(folder / "text.txt"), GROUPS["model"]["seq"], "bytes")
    validated, held = folder / "validated.tfrecords", folder / "held"
    os.rename(records, validated)
    (folder / "val.index").write_text(f"{validated}\n")
    # the size of the text, for the bits per byte of `straight`
    (folder / "manifest.json").write_text(json.dumps({"val": json.loads(Path(cached_counts(records)).read_text())}))
    write(folder, data={"val_set": {"held": "val.index"}})
    os.mkfifo(held)
    (folder / "sitecustomize.py").write_text(HOLD_RENAMES)
    variables = {"JAX_COMPILATION_CACHE_DIR": folder / "compiled", "PYTHONPATH": folder, "HELD": held}
    options = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
    options += ["--set", f"cluster.step_limit={STEP_LIMIT_S}"]
    with driver(folder, *_command(ray_nodes, *options), **worker_environment) as run:
        run.wait_for_line("parameters;", 0)
        time.sleep(0.5)
        when = run.now
        stop_main_thread(worker_pid(ray_nodes.temporary, 1))
        _hung(run, when, "a worker in its compilation", ["no sign of work", "has stopped"], "worker 1: ")
        run.wait_for_line("recovered", when)

        run.wait_for_step(45)
        os.rename(validated, folder / "aside")
        os.mkfifo(validated)
        run.wait_for_step(59)
        when = run.now
        _hung(run, when, "a validation", ["no sign of work"], "in phase validate, step 60")
        validated.unlink()
        os.rename(folder / "aside", validated)
        run.wait_for_line("recovered", when)
        before = redone(folder)
        assert before > 0

        run.wait_for_step(79)
        when = run.now
        _hung(run, when, "a save", ["no sign of work"], "in phase save, step 80")
        held.unlink()
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] == before + 79


def _stop(pid):
    os.kill(pid, signal.SIGSTOP)


def _hung(run, when, what, reasons, where):
    assert _detected(run, when, what, reasons, where) - when < STEP_LIMIT_S + 10


def _detected(run, when, what, reasons, where=""):
    """The time at which the driver logs a crash after `when`, which must be within DETECTION_S."""
    seen = run.wait_for_line("worker crash", when)
    verdict = run.line_with("worker crash", when)
    assert where in verdict
    assert any(reason in verdict for reason in reasons), verdict
    sys.stdout.write(f"{what}: detected after {seen - when:.1f} s: {verdict}\n")
    assert seen - when < DETECTION_S
    return seen


def _recovered(run, what, since):
    """Wait for the next step after the time `since`."""
    again = run.wait_for_line("recovered", since)
    sys.stdout.write(f"{what}: the next step {again - since:.1f} s later\n")


@pytest.mark.nightly
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


def test_a_host_and_the_head_of_ray_die_while_the_driver_streams(folder, ray_nodes, straight, worker_environment):
    """Agent and worker die with their machine, and another machine gets its number. All nodes die with the head: the
    driver waits for a new head at the same address, and for its nodes."""
    with driver(folder, *_command(ray_nodes, "--set", "data.read_by=driver"), **worker_environment) as run:
        run.wait_for_step(50)
        when = run.now
        ray_nodes.ask("kill 1")
        seen = run.wait_for_line("preemption at step", when)
        sys.stdout.write(f"host gone: detected after {seen - when:.1f} s\n")
        assert seen - when < DETECTION_S
        run.wait_for_line("waiting for hosts", when)
        ray_nodes.ask("add 1")
        _recovered(run, "host gone", run.now)
        before = redone(folder)
        assert before > 0

        run.wait_for_step(90)
        pids, when = [worker_pid(ray_nodes.temporary, i) for i in range(2)], run.now
        ray_nodes.ask("kill head")
        _detected(run, when, "head", ["the head of the Ray cluster"])
        run.wait_for_line("waiting for hosts", when)
        assert not any(map(is_running, pids))
        ray_nodes.ask("add head")
        _recovered(run, "head", run.now)
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] > before
