"""A pseudo-terminal on which a program runs, and which the test closes."""

import contextlib
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from support.commands import REPO, own_environment
from support.fork_server import DEFAULT_SIGNALS


class Terminal:
    """A terminal that reads what programs write, as a window does."""

    def __init__(self) -> None:
        self._window, self._device = os.openpty()
        self._closed = threading.Event()
        self._written = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self,
        program: str,
        *arguments: str,
        cwd: Path,
        controlling: bool = True,
        under: tuple[str, ...] = (),
        **environment: str,
    ) -> subprocess.Popen[bytes]:
        """Start an entry point of the project in a session of its own, with the terminal as its standard streams.

        Args:
            controlling: whether Linux sends SIGHUP to the program when the terminal closes.
            under: the program that starts it, such as nohup.
        """
        session = ("setsid", "--ctty") if controlling else ("setsid",)
        command = [*DEFAULT_SIGNALS, *session, *under, sys.executable, str(REPO / program), *arguments]
        environment = {**own_environment(dict(os.environ), 1), "XDG_CACHE_HOME": str(cwd / "cache"), **environment}
        return subprocess.Popen(
            command, cwd=cwd, env=environment, stdin=self._device, stdout=self._device, stderr=self._device
        )

    def close(self) -> str:
        """Close it. Returns what was written."""
        if not self._closed.is_set():
            self._closed.set()
            self._reader.join()
            os.close(self._device)
            os.close(self._window)
        return self._written.decode(errors="replace")

    def _read(self) -> None:
        while not self._closed.is_set():
            if select.select([self._window], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self._written += os.read(self._window, 1 << 16)


@contextlib.contextmanager
def terminal() -> Iterator[Terminal]:
    """A terminal, which is closed at the end."""
    made = Terminal()
    try:
        yield made
    finally:
        made.close()
