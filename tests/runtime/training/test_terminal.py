"""The terminal of a command closes, or its SSH connection is lost."""

import signal
from pathlib import Path

import pytest
from support.commands import metrics, wait_for_step, write_run
from support.terminals import terminal

STEPS = 400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(
        tmp_path,
        optimizer={"total_steps": STEPS, "anneal_steps": STEPS},
        data={"val_set": {}, "val_batches": 0},
        checkpoint={"ckpt_every": STEPS},
    )
    return tmp_path


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("run/step_*"))


def train_until_closed(folder: Path, code: int, **options: object) -> str:
    """Train on a terminal that closes after some steps. Returns what the terminal has shown."""
    with terminal() as window:
        process = window.start("device_train.py", "--config", "config.json", cwd=folder, **options)
        try:
            wait_for_step(process, folder / "run", 3)
            shown = window.close()
            assert process.wait(300) == code
        finally:
            process.kill()
            process.wait()
    return shown


def test_a_run_saves_when_its_terminal_closes(folder):
    shown = train_until_closed(folder, 128 + signal.SIGHUP)
    # a bar, and no line that it cannot end
    assert "train" in shown
    assert "Traceback" not in shown
    steps = [record["step"] for record in metrics(folder / "run")]
    assert 3 <= steps[-1] < STEPS
    assert saved(folder) == [f"step_{steps[-1]}"]


def test_with_nohup_a_run_goes_on(folder):
    train_until_closed(folder, 0, under=("nohup",))
    assert saved(folder) == [f"step_{STEPS}"]
    assert "Traceback" not in (folder / "nohup.out").read_text()


def test_a_run_goes_on_when_it_cannot_write_to_its_terminal(folder):
    """As after `disown`: no signal, and each write of the progress bar fails with EIO."""
    train_until_closed(folder, 0, controlling=False)
    assert saved(folder) == [f"step_{STEPS}"]
    assert len(metrics(folder / "run")) == STEPS
