"""train.py and eval_harness.py with real workers on this machine: numbers, death of the driver, user errors, hangs."""

import os
import signal
import sys
import time

import pytest
from support.commands import metrics
from support.commands import run as run_command
from support.counting import NAME, write_task
from support.driving import STEPS, driver, kill, same_numbers, wait_for_end, worker_pid, write
from support.gate import Gate
from support.waiting import until
from support.xla import cpu_flags

pytestmark = pytest.mark.multiprocess
TWO = ["--processes", "2"]
# the default is 20 s; a hang must be detected within ten seconds more
STEP_LIMIT_S = 10
HOLD_IMPORTS = """
import contextlib, os, sys
def hold(event, arguments):
    if event == "import" and arguments[0] == os.environ["HELD_IMPORT"] and os.path.exists(os.environ["HELD"]):
        with open(os.environ["HELD"] + ".reached", "w"):
            pass
        with contextlib.suppress(FileNotFoundError), open(os.environ["HELD"]):  # a FIFO that nobody writes to
            pass
sys.addaudithook(hold)
"""


@pytest.fixture
def environment(worker_environment, tmp_path):
    return {**worker_environment, "TMPDIR": str(tmp_path)}


@pytest.mark.nightly
def test_the_numbers_of_one_process_with_four_devices(tmp_path, straight):
    """Equal up to the order of float32 sums in a collective."""
    write(tmp_path)
    run_command("device_train.py", "--config", "config.json", cwd=tmp_path, devices=4)
    expected, records = metrics(tmp_path / "run"), metrics(straight)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for a, b in zip(expected, records, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-3)
        assert ("val/loss_held" in a) == ("val/loss_held" in b)
    assert records[0]["train/loss"] == pytest.approx(expected[0]["train/loss"], rel=1e-6)


@pytest.mark.faults
def test_streamed_batches_and_the_end_of_the_driver(tmp_path, straight, environment):
    """After SIGTERM to the driver the run saves. After its SIGKILL the workers reach a step for which all have batches,
    save and end."""
    write(tmp_path, data={"read_by": "driver"})
    # the signal takes a second to the workers
    slow = Gate(tmp_path / "slow", pause_s=0.05)
    with driver(tmp_path, *TWO, **environment, **slow.variables) as run:
        run.wait_for_step(20)
        run.process.send_signal(signal.SIGTERM)
        errors = run.finish(143)
    assert "preemption_notifier" not in errors
    assert "Reached preemption sync point" not in errors
    first = _last_saved(tmp_path)
    with driver(tmp_path, *TWO, **environment, **slow.variables) as run:
        run.wait_for_step(first + 1)
        pids = [worker_pid(tmp_path, i) for i in range(2)]
        kill(run.process.pid)
        for pid in pids:
            wait_for_end(pid)
    assert first < _last_saved(tmp_path) < STEPS
    with driver(tmp_path, *TWO, **environment) as run:
        run.finish()
    # no step was repeated
    assert len(same_numbers(straight, tmp_path / "run")) == STEPS


@pytest.mark.faults
@pytest.mark.parametrize(
    ("mesh", "read_by"),
    [
        pytest.param({"pp": 2, "fsdp": 2, "tp": 2}, "host", id="pp"),
        pytest.param({"cp": 2, "tp": 4}, "driver", id="cp", marks=pytest.mark.nightly),
    ],
)
def test_processes_that_read_the_same_rows(tmp_path, environment, mesh, read_by):
    """Two processes of four devices differ in pp or cp alone. One is killed; the run equals that of one device."""
    groups = {
        "model": {"layers": 2, "n_heads": 4},
        "optimizer": {"total_steps": 24, "gradient_accumulation_steps": 2},
        "data": {"batch_size": 4, "read_by": read_by, "val_every": 12},
        "checkpoint": {"ckpt_every": 8},
    }
    write(tmp_path / "one", **groups)
    run_command("device_train.py", "--config", "config.json", cwd=tmp_path / "one")
    write(tmp_path, **groups, mesh=mesh)
    environment["XLA_FLAGS"] = cpu_flags(4)
    gate = Gate(tmp_path / "gate", 11)
    with driver(tmp_path, *TWO, **environment, **gate.variables) as run:
        gate.wait(run)
        kill(worker_pid(tmp_path, 1))
        gate.open()
        assert run.finish().count("worker crash") == 1
    expected = {record["step"]: record for record in metrics(tmp_path / "one/run")}
    records = metrics(tmp_path / "run")
    # some steps are repeated
    assert {record["step"] for record in records} == set(range(1, 25))
    for record in records:
        one = expected[record["step"]]
        names = [n for n in one if n in ("train/loss", "train/last_loss", "train/grad_norm", "val/loss_held")]
        # the order of float32 sums
        assert {n: record[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=1e-5)


def _last_saved(folder):
    """The last step of the metrics file, which must have a checkpoint."""
    last = metrics(folder / "run")[-1]["step"]
    assert (folder / f"run/step_{last}").exists()
    return last


def test_evaluation_gives_the_numbers_of_one_process(tmp_path, evaluated):
    together = evaluated(*TWO, TMPDIR=str(tmp_path))
    assert together == pytest.approx(evaluated(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ("mesh.dp=8", 2, "mesh.dp 8 = 8 devices, found 4"),
        ("optimizer.lr=1e30", 1, "not finite"),
    ],
)
def test_a_user_error_ends_the_run_at_once(tmp_path, environment, change, code, message):
    """The workers find it, the driver prints it, and there is no restart."""
    write(tmp_path)
    with driver(tmp_path, *TWO, "--set", change, **environment) as run:
        errors = run.finish(code)
    assert message in errors.splitlines()[-1].partition(" error: ")[2]
    assert errors.count(message) == 1
    # the driver kills the others
    assert any(message in log.read_text() for log in tmp_path.glob("mesh-transformer-*/run-*-[01].log"))
    assert "restarting in" not in errors
    assert "Traceback" not in errors


@pytest.mark.faults
@pytest.mark.parametrize(
    ("phase", "held_import"),
    [
        ("start", "mesh_transformer.runtime.training.trainer"),
        pytest.param("evaluate", "mesh_transformer.runtime.evaluation.adaptor", marks=pytest.mark.nightly),
    ],
)
def test_a_hanging_start_and_a_slow_one(tmp_path, straight, environment, phase, held_import):
    """Workers hang before their mesh forms, or in an evaluation: the driver detects it. In the next attempt they wait
    for longer than the limit and continue: the driver lets them, because a hang doubles the limit."""
    held = tmp_path / "held"
    os.mkfifo(held)
    (tmp_path / "sitecustomize.py").write_text(HOLD_IMPORTS)
    environment.update(PYTHONPATH=str(tmp_path), HELD=str(held), HELD_IMPORT=held_import)
    folder, program, more = tmp_path, "train.py", []
    if phase == "evaluate":
        pytest.importorskip("lm_eval")
        folder, program = straight.parent, "eval_harness.py"
        more = [
            "--tasks",
            NAME,
            "--include-path",
            str(write_task(tmp_path)),
            "--output",
            str(tmp_path / "found.json"),
        ]
    else:
        write(folder)
    more += ["--set", f"cluster.step_limit={STEP_LIMIT_S}"]
    with driver(folder, *TWO, *more, program=program, **environment) as run:
        when = _reached(held, run)
        seen = run.wait_for_line("worker crash", when)
        sys.stdout.write(
            f"hang in {phase}: detected after {seen - when:.1f} s: {run.line_with('worker crash', when)}\n"
        )
        assert "no sign of work" in run.line_with(f"in phase {phase}, step 0", when)
        _reached(held, run)
        time.sleep(STEP_LIMIT_S + 3)
        waiting = os.open(held, os.O_WRONLY)
        held.unlink()
        os.close(waiting)
        errors = run.finish()
    assert errors.count("worker crash") == 1
    if phase == "start":
        assert len(same_numbers(straight, folder / "run")) == STEPS


def _reached(held, run):
    """The time at which a worker reaches the held import."""
    reached = held.with_name("held.reached")
    until(reached.exists, run.process, shown=lambda: run.text)
    now = run.now
    # for the other worker
    time.sleep(2)
    reached.unlink()
    return now
