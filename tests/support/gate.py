"""A gate that holds the workers of a run before a step, so that a fault comes at its step on any machine."""

import os
from collections.abc import Iterable
from pathlib import Path

from support.driving import Driver
from support.waiting import until

IN_WORKER = Path(__file__).with_name("gate_in_worker.py")
OPEN = 1 << 40


class Gate:
    """Holds all workers of a run before step `step`, from the start of the run.

    Args:
        folder: a new folder, which the workers can read and write.
        program: more code for the start of each worker's interpreter.
        pause_s: how much longer each step takes.
    """

    def __init__(self, folder: Path, step: int = OPEN, *, program: str = "", pause_s: float = 0.0):
        folder.mkdir()
        self._folder = folder
        (folder / "sitecustomize.py").write_text(f"{IN_WORKER.read_text()}\n{program}")
        self.variables = {"PYTHONPATH": str(folder), "GATE_PAUSE_S": str(pause_s)}
        self.hold(step)

    @property
    def options(self) -> list[str]:
        """The variables as options of train.py on a cluster."""
        return [part for name, value in self.variables.items() for part in ("--env", f"{name}={value}")]

    def hold(self, step: int) -> None:
        """Let the workers go on, up to this step."""
        self._step = step
        (self._folder / "next").write_text(str(step))
        os.replace(self._folder / "next", self._folder / "step")

    def open(self) -> None:
        """Let the workers go on to the end."""
        self.hold(OPEN)

    def wait(self, run: Driver, workers: Iterable[int] = range(2)) -> None:
        """Return when all these workers hold."""
        marks = [self._folder / f"{self._step}.{worker}" for worker in workers]
        until(lambda: all(mark.exists() for mark in marks), run.process, shown=lambda: run.text[-6000:])
