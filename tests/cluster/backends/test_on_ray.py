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
    redone,
    same_numbers,
    stop_main_thread,
    wait_for_end,
    worker_pid,
    write,
)
from support.gate import OPEN, Gate

from mesh_transformer.data.corpus.sequences import cached_records
from mesh_transformer.data.records.text_counts import MANIFEST, counts_of_cached

pytestmark = pytest.mark.faults
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
    """Five faults between checkpoints.

    The worker of a killed agent saves and ends, some twenty steps later: this comes first, so that the run does not end
    before the next fault. The worker of a stopped agent is killed with it.
    """
    faults = [
        (1, kill, ["killed by SIGKILL"], 85),
        (0, _stop, ["has stopped"], 95),
        # if it holds the interpreter's lock, no other thread of the process can send heartbeats
        (1, stop_main_thread, ["it hangs", "has stopped"], 105),
    ]
    # the workers of a killed agent agree on a step to save, which must come before the gate
    gate = Gate(folder / "gate", 45, pause_s=0.02)
    with driver(folder, *_command(ray_nodes, *gate.options), **worker_environment) as run:
        _break_agent(run, gate, ray_nodes, 1, kill, "its agent has died", 75)
        for worker_id, break_it, reasons, next_step in faults:
            gate.wait(run)
            pid, when = worker_pid(ray_nodes.temporary, worker_id), run.now
            break_it(pid)
            gate.hold(next_step)
            seen = _detected(run, when, reasons[0], reasons, f"worker {worker_id}: ")
            _recovered(run, reasons[0], seen)
            assert not is_running(pid)
        _break_agent(run, gate, ray_nodes, 0, _stop, "has not answered", OPEN)
        errors = run.finish()
    records = same_numbers(straight, folder / "run")
    # steps are repeated after each fault but that of the killed agent
    assert len(records) - STEPS >= 4
    assert records[-1]["train/steps_redone"] == len(records) - STEPS
    assert errors.count("recovered") == len(faults) + 2


def _break_agent(run, gate, ray_nodes, worker_id, break_it, reason, next_step):
    """Break the agent of a worker at the gate, and wait until the run goes on. The gate moves to the next step."""
    gate.wait(run)
    worker = worker_pid(ray_nodes.temporary, worker_id)
    agent, when = parent(worker), run.now
    break_it(agent)
    # otherwise the run would finish before the detection
    if break_it is _stop:
        _stop(worker_pid(ray_nodes.temporary, 1 - worker_id))
    gate.hold(next_step)
    seen = _detected(run, when, f"agent: {reason}", [reason], f"worker {worker_id}: ")
    _recovered(run, "agent", seen)
    assert not is_running(agent)
    assert not is_running(worker)


def test_hangs_outside_of_steps(folder, ray_nodes, straight, worker_environment, monkeypatch):
    """Three hangs.

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
    (folder / MANIFEST).write_text(f'{{"val": {counts_of_cached(records).to_json()}}}')
    write(folder, data={"val_set": {"held": "val.index"}})
    os.mkfifo(held)
    gate = Gate(folder / "gate", 45, program=HOLD_RENAMES)
    gate.variables |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "HELD": str(held)}
    options = [*gate.options, "--set", f"cluster.step_limit={STEP_LIMIT_S}"]
    with driver(folder, *_command(ray_nodes, *options), **worker_environment) as run:
        run.wait_for_line("parameters;", 0)
        time.sleep(0.5)
        when = run.now
        stop_main_thread(worker_pid(ray_nodes.temporary, 1))
        _detected(run, when, "a worker in its compilation", ["no sign of work", "has stopped"], "worker 1: ")
        run.wait_for_line("recovered", when)

        gate.wait(run)
        os.rename(validated, folder / "aside")
        os.mkfifo(validated)
        when = run.now
        gate.hold(80)
        _detected(run, when, "a validation", ["no sign of work"], "in phase validate, step 60")
        validated.unlink()
        os.rename(folder / "aside", validated)
        run.wait_for_line("recovered", when)
        before = redone(folder)
        assert before > 0

        gate.wait(run)
        when = run.now
        gate.open()
        _detected(run, when, "a save", ["no sign of work"], "in phase save, step 80")
        held.unlink()
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] == before + 79


def _stop(pid):
    os.kill(pid, signal.SIGSTOP)


def _detected(run, when, what, reasons, where=""):
    """The time at which the driver logs a crash after `when`."""
    seen = run.wait_for_line("worker crash", when)
    verdict = run.line_with("worker crash", when)
    assert where in verdict
    assert any(reason in verdict for reason in reasons), verdict
    sys.stdout.write(f"{what}: detected after {seen - when:.1f} s: {verdict}\n")
    return seen


def _recovered(run, what, since):
    """Wait for the next step after the time `since`."""
    again = run.wait_for_line("recovered", since)
    sys.stdout.write(f"{what}: the next step {again - since:.1f} s later\n")


@pytest.mark.nightly
def test_driver_killed_and_started_again(folder, ray_nodes, straight, worker_environment):
    """A driver that starts soon continues with the running workers. Later, the workers have saved and ended. No step is
    lost."""
    gate = Gate(folder / "gate", 10)
    command = _command(ray_nodes, *gate.options, "--set", "cluster.driver_timeout=9")

    def kill_driver(run, next_step):
        """Stop worker 1, which is not JAX's coordinator, so that the run makes no progress without a driver."""
        gate.wait(run)
        pid = worker_pid(ray_nodes.temporary, 1)
        os.kill(pid, signal.SIGSTOP)
        kill(run.process.pid)
        run.process.wait()
        gate.hold(next_step)
        return pid

    with driver(folder, *command, **worker_environment) as run:
        pid = kill_driver(run, 50)
    with driver(folder, *command, **worker_environment) as run:
        run.wait_for_line("continuing with the running workers", 0)
        os.kill(pid, signal.SIGCONT)
        assert kill_driver(run, OPEN) == pid
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
    gate = Gate(folder / "gate", 50)
    command = _command(ray_nodes, *gate.options, "--set", "data.read_by=driver")
    with driver(folder, *command, **worker_environment) as run:
        gate.wait(run)
        when = run.now
        ray_nodes.ask("kill 1")
        gate.hold(90)
        seen = run.wait_for_line("preemption at step", when)
        sys.stdout.write(f"host gone: detected after {seen - when:.1f} s\n")
        run.wait_for_line("waiting for hosts", when)
        ray_nodes.ask("add 1")
        _recovered(run, "host gone", run.now)
        before = redone(folder)
        assert before > 0

        gate.wait(run)
        pids, when = [worker_pid(ray_nodes.temporary, i) for i in range(2)], run.now
        ray_nodes.ask("kill head")
        gate.open()
        _detected(run, when, "head", ["the head of the Ray cluster"])
        run.wait_for_line("waiting for hosts", when)
        assert not any(map(is_running, pids))
        ray_nodes.ask("add head")
        _recovered(run, "head", run.now)
        run.finish()
    assert same_numbers(straight, folder / "run")[-1]["train/steps_redone"] > before
