"""train.py and eval_harness.py with real workers on this machine: the numbers, the driver's death, the user's errors."""

from __future__ import annotations

import signal

import pytest
from commands import metrics
from commands import run as run_command
from driving import STEPS, driver, kill, same_numbers, wait_for_end, worker_pid, write

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
TWO = ["--processes", "2"]


@pytest.fixture
def environment(worker_environment, tmp_path):
    return {**worker_environment, "TMPDIR": str(tmp_path)}


def test_as_one_process_of_four_devices(tmp_path, straight):
    """But for the order of float32 sums in a collective."""
    write(tmp_path)
    run_command("device_train.py", "--config", "config.json", cwd=tmp_path, devices=4)
    expected, records = metrics(tmp_path / "run"), metrics(straight)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    for a, b in zip(expected, records, strict=True):
        assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-3)
        assert ("val/loss_held" in a) == ("val/loss_held" in b)
    assert records[0]["train/loss"] == pytest.approx(expected[0]["train/loss"], rel=1e-6)


def test_streamed_batches_and_the_drivers_end(tmp_path, straight, environment):
    """SIGTERM to the driver saves. Killed, its workers reach a step that all have batches for, save there, and end."""
    write(tmp_path, data={"read_by": "driver"})
    with driver(tmp_path, *TWO, **environment) as run:
        run.wait_for_step(20)
        run.process.send_signal(signal.SIGTERM)
        run.finish(143)
    first = _last_saved(tmp_path)
    with driver(tmp_path, *TWO, **environment) as run:
        run.wait_for_step(max(first, 50))
        pids = [worker_pid(tmp_path, i) for i in range(2)]
        kill(run.process.pid)
        for pid in pids:
            wait_for_end(pid)
    assert first < _last_saved(tmp_path) < STEPS
    with driver(tmp_path, *TWO, **environment) as run:
        run.finish()
    assert len(same_numbers(straight, tmp_path / "run")) == STEPS  # nothing was done again


def _last_saved(folder):
    """The last step of the metrics file, of which there is a checkpoint."""
    last = metrics(folder / "run")[-1]["step"]
    assert (folder / f"run/step_{last}").exists()
    return last


def test_evaluation_gives_the_numbers_of_one_process(tmp_path, evaluated):
    together = evaluated(*TWO, TMPDIR=str(tmp_path))
    assert together == pytest.approx(evaluated(), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        ("mesh.dp=8", 2, "mesh.dp 8 x mesh.fsdp 1 x mesh.tp 1 = 8 devices, found 4"),
        ("optimizer.lr=1e30", 1, "not finite"),
    ],
)
def test_the_users_error_stops_at_once(tmp_path, environment, change, code, told):
    """Found by the workers, told by the driver, not tried again."""
    write(tmp_path)
    with driver(tmp_path, *TWO, "--set", change, **environment) as run:
        errors = run.finish(code)
    assert told in errors.splitlines()[-1]
    assert "beginning again" not in errors
    assert "Traceback" not in errors
