"""What a command shows while it works: at its start, and how much time is left."""

import io
import logging
import os
import subprocess
import sys

import pytest
from support.commands import REPO

from mesh_transformer import logs
from mesh_transformer.cluster.base import Poll, Status
from mesh_transformer.cluster.driver.display import Display

COMMANDS = {
    "device_train": ["--config", "tiny_shakespeare"],
    "device_sample": ["--prompt", "a"],
    "device_serve": [],
    "eval_harness": [],
    "preflight": ["--config", "tiny_shakespeare"],
    "to_hf_weights": ["--input-ckpt", "a", "--output-path", "b"],
    "from_hf_weights": ["--input", "a", "--output-path", "b"],
    "slim_model": ["--ckpt", "a"],
    "resharding_example": ["--ckpt", "a"],
}
WITHOUT_JAX = f"""
import contextlib, importlib, sys

sys.modules["jax"] = None
for name, arguments in {COMMANDS}.items():
    sys.argv = [name, *arguments]
    sys.stderr.write(f"{{name}}:")
    with contextlib.suppress(ImportError):
        importlib.import_module(name).main()
"""


def test_each_command_says_something_before_it_imports_jax():
    """The import takes seconds. Here it fails."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    child = subprocess.run([sys.executable, "-c", WITHOUT_JAX], env=environment, capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (0, "")
    lines = [line.partition(":") for line in child.stderr.splitlines()]
    assert [name for name, _, _ in lines] == list(COMMANDS)
    assert {line.partition(" ")[2] for _, _, line in lines} == {"I importing JAX"}


class Clock:
    """A time that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(logs, "time", clock)
    return clock


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_time_left_is_that_of_units_after_the_first_one(clock, caplog):
    """A step takes a second, and a minute of compilation precedes the first one. A validation compiles too."""
    caplog.set_level(logging.INFO, "mesh_transformer")
    progress = logs.Progress("training", 100, unit="step")
    clock.now = 61
    progress.update(1)
    for step in range(2, 12):
        clock.now += 1
        progress.update(step)
    clock.now += 40
    progress.exclude(40)
    for step in range(12, 21):
        clock.now += 1
        progress.update(step)
    lines = ["training 1/100  eta ?", "training 11/100  eta 0:01:29", "training 12/100  eta 0:01:28"]
    assert _lines(caplog) == lines


def test_the_next_unit_is_a_plain_line(caplog):
    caplog.set_level(logging.INFO, "mesh_transformer")
    logs.Progress("compiling", 2, unit="program").begin("training step for v3-8")
    logs.Progress("compiling", 2, unit="program", quiet=True).begin("training step for v4-8")
    assert _lines(caplog) == ["compiling: training step for v3-8"]


def _terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Standard error is a terminal of 80 columns from now on. No fixture: pytest replaces it for each phase of a
    test."""
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(logs.Progress, "bars", True)
    monkeypatch.setattr("tqdm.std._screen_shape_wrapper", lambda: lambda _: (80, 24))
    return screen


def test_a_program_that_uses_the_package_sees_no_bar(clock, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "mesh_transformer")
    screen = _terminal(monkeypatch)
    monkeypatch.setattr(logs.Progress, "bars", False)
    logs.Progress("training", 1, unit="step").update(1)
    assert (screen.getvalue(), _lines(caplog)) == ("", ["training 1/1  eta 0:00:00"])


def test_the_bar_has_the_same_time_left(clock, monkeypatch):
    screen = _terminal(monkeypatch)
    progress = logs.Progress("training", 100, unit="step", done=10)
    assert "training 10/100 |" in screen.getvalue()
    clock.now = 61
    progress.update(11)
    progress.begin("the twelfth")
    assert "eta ?, the twelfth" in screen.getvalue()
    clock.now = 63
    progress.update(12)
    progress.close()
    assert "eta 0:02:56" in screen.getvalue().split("\r")[-1]


def test_the_driver_counts_the_steps_between_its_questions(clock, monkeypatch):
    """Several steps arrive together."""
    screen = _terminal(monkeypatch)
    start_point = {"step": 0, "total": 100, "steps_redone": 0, "chips": 2}
    statuses = (Status(0, "running", start_point=start_point),)
    display = Display()
    for clock.now, steps in ((30.0, range(1, 6)), (35.0, range(6, 11))):
        metrics = [{"train/loss": 1.0, "train/tokens_per_sec": 10.0 * step} for step in steps]
        events = [
            (0, {"kind": "metrics", "step": step, "scalars": each}) for step, each in zip(steps, metrics, strict=True)
        ]
        display.show(Poll(statuses, tuple(events)))
    display.close()
    assert "eta 0:01:30, loss 1.0000  tokens/s 100" in screen.getvalue()
