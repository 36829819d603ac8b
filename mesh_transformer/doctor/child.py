"""Programs that may hang, such as those that ask a driver: they run in a process of their own, for a limited time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

# bytes that are kept, from the end of each output of a program
_KEPT_BYTES = 20_000
# a process in a system call of a driver that hangs does not end when it is killed
_KILL_S = 2.0


class Ended(NamedTuple):
    """A program that ended or was ended.

    Args:
        code: exit code; negative: the number of the signal that ended it; None: it did not end in time.
    """

    code: int | None
    output: str
    errors: str

    @property
    def reason(self) -> str:
        """The last line that it printed, or its exit code."""
        lines = (self.output + "\n" + self.errors).split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return last[:300] or f"exit code {self.code}"


def run(command: Sequence[str], limit_s: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a program, and end it with its children after `limit_s` seconds.

    Its output goes to files: a pipe would stay open as long as any of its children.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            env=environment,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(limit_s)
        finally:
            if code is None:
                _kill(process)
        return Ended(code, _end(output), _end(errors))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)


def _end(file: IO[bytes]) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_BYTES))
    return file.read().decode(errors="replace")
