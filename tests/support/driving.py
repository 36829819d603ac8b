"""A driver process under test: start, output, workers, signals."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.commands import REPO, metrics, write_run
from support.waiting import LONG_S, MOST_S, until

STEPS = 120
PTRACE_SEIZE, PTRACE_INTERRUPT, WAIT_FOR_ALL = 0x4206, 0x4207, 0x40000000

# a step takes some milliseconds, and compiling a few seconds; a checkpoint every 40 steps
GROUPS: dict[str, dict[str, Any]] = {
    "model": {"layers": 1, "d_model": 16, "n_heads": 2, "seq": 16, "pe_rotary_dims": 4},
    "optimizer": {"total_steps": STEPS, "anneal_steps": STEPS, "gradient_accumulation_steps": 1},
    "data": {"val_every": 60, "val_batches": 1},
    "checkpoint": {"ckpt_every": 40, "keep_every": None},
    "logging": {"tensorboard": False, "plot": False},
}


def write(folder: Path, **groups: dict[str, Any]) -> Path:
    """Write a text and config.json, which is GROUPS with changes, into a folder. Returns the path of the config."""
    names = {**GROUPS, **groups}
    return write_run(folder, **{name: {**GROUPS.get(name, {}), **groups.get(name, {})} for name in names})


class Driver:
    """train.py, or another command, running in `folder`. `lines` has (seconds since the start, line of standard error).

    Args:
        prefix: words before the command.
    """

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        prefix: Sequence[str] = (),
        program: str = "train.py",
        **environment: str,
    ):
        self.folder, self.lines = folder, []
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [*prefix, sys.executable, str(REPO / program), "--config", "config.json", *arguments],
            cwd=folder,
            env={**os.environ, **environment},
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append((time.monotonic() - self._began, line.rstrip("\n")))

    @property
    def now(self) -> float:
        return time.monotonic() - self._began

    @property
    def text(self) -> str:
        return "\n".join(f"{when:6.1f} {line}" for when, line in list(self.lines))

    def finish(self, code: int = 0) -> str:
        """Wait for the end. Returns standard error, and shows it if the exit code differs from `code`."""
        self.process.wait(MOST_S)
        self._reader.join(LONG_S)
        assert self.process.returncode == code, f"exit code {self.process.returncode}, not {code}\n{self.text[-6000:]}"
        return self.text

    def wait_for_step(self, step: int) -> int:
        """Wait until the last record of the metrics file is of `step` or a later step, and return its step."""
        path = self.folder / "run/metrics.jsonl"

        def last() -> int:
            records = metrics(path.parent, running=True) if path.exists() else []
            return records[-1]["step"] if records and records[-1]["step"] >= step else 0

        return until(last, self.process, shown=self._end)

    def line_with(self, part: str, after: float) -> str:
        """The first line with `part` after the time `after`."""
        return next(line for when, line in list(self.lines) if when > after and part in line)

    def wait_for_line(self, part: str, after: float) -> float:
        """Wait for a line with `part` after the time `after`, and return its time."""

        def when() -> float:
            return next((when for when, line in list(self.lines) if when > after and part in line), 0)

        return until(when, self.process, shown=self._end)

    def _end(self) -> str:
        return self.text[-6000:]


@contextlib.contextmanager
def driver(folder: Path, *arguments: str, **environment: str) -> Iterator[Driver]:
    """A driver that is killed at the end if it still runs."""
    started = Driver(folder, *arguments, **environment)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
            started.process.wait()
        # pytest shows it if the test fails
        sys.stdout.write(f"{started.text}\n")


def worker_pid(temporary: Path, worker_id: int) -> int:
    """The worker process of the only run with locks below `temporary`."""
    (lock,) = temporary.glob(f"mesh-transformer-*/run-*-{worker_id}.lock")
    pid = int(lock.read_text())
    assert b"mesh_transformer.cluster.host.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return pid


def parent(pid: int) -> int:
    """The parent of a process. The parent of a worker is its agent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_end(pid: int) -> None:
    """Return when a process has ended."""
    until(lambda: not is_running(pid), shown=lambda: f"process {pid} still runs")


def stop_main_thread(pid: int) -> None:
    """Stop only the main thread of a process until the process is killed, through ptrace. A signal would stop all
    threads."""
    failed: list[str] = []
    stopped = threading.Event()

    def debug() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        for request in (PTRACE_SEIZE, PTRACE_INTERRUPT):
            if libc.ptrace(request, pid, None, None) != 0:
                failed.append(os.strerror(ctypes.get_errno()))
        stopped.set()
        status = 0x7F
        # wait while the thread is stopped; the kernel reports the end of the process here before its parent can see it
        while not failed and status & 0x7F == 0x7F:
            _, status = os.waitpid(pid, WAIT_FOR_ALL)

    threading.Thread(target=debug, daemon=True).start()
    assert stopped.wait(LONG_S)
    assert not failed, failed


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def redone(folder: Path) -> int:
    """The number of repeated steps in the metrics file."""
    return int(metrics(folder / "run", running=True)[-1]["train/steps_redone"])


def same_numbers(straight: Path, other: Path, *, stopped: bool = False) -> list[dict[str, Any]]:
    """Check that every record of `other` equals the record of the same step in `straight`, bit by bit. Returns those of
    `other`.

    Args:
        stopped: `other` may have ended before the last step.
    """
    records = metrics(other)
    steps = [record for record in metrics(straight) if not stopped or record["step"] <= records[-1]["step"]]
    expected = {record["step"]: record for record in steps}
    assert {record["step"] for record in records} == expected.keys()
    measured = {"tokens_per_sec", "tflops_per_device", "mfu", "goodput", "steps_redone"}
    different = {f"train/{name}" for name in measured}
    for record in records:
        twin = expected[record["step"]]
        for name in (record.keys() | twin.keys()) - different:
            assert record.get(name) == twin.get(name), (record["step"], name)
    return records
