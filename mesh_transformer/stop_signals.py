"""What stops a program: SIGTERM (a preemption notice), SIGHUP (a closed terminal or a lost SSH connection) and Ctrl-C.
And what must not: a terminal to which it can no longer write."""

from __future__ import annotations

import errno
import io
import logging
import signal
import sys
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing import Self

    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)


def _terminations() -> tuple[signal.Signals, ...]:
    # Windows has no SIGHUP; nohup and supervisors let the program ignore it
    if not hasattr(signal, "SIGHUP") or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGTERM,)
    return (signal.SIGTERM, signal.SIGHUP)


TERMINATIONS = _terminations()
"""The signals that end a program, besides Ctrl-C. They are read at the import, because libtpu ignores SIGHUP later."""


class StopSignals:
    """While active, records a signal in `received` and logs `message` at the first one.

    A second Ctrl-C ends the process at once. A second SIGTERM or SIGHUP does not: schedulers repeat SIGTERM, and a
    terminal and its shell each send SIGHUP.
    """

    def __init__(self, message: str = "the workers save after this step, then the run ends"):
        self.received: int | None = None
        self._message = message
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        numbers = (*TERMINATIONS, signal.SIGINT)
        self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
        if self.received is None:
            again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            log.warning("%s: %s%s", signal.Signals(number).name, self._message, again)
        self.received = number


def outlive_terminal() -> None:
    """Let the program go on when its terminal is closed: what it writes later is dropped.

    Linux then fails each write with EIO, of log lines and progress bars too.
    """
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


class _Terminal(io.FileIO):
    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(content).nbytes


def _lasting(stream: TextIO) -> TextIO:
    """A stream with the settings of `stream`, and with `_Terminal` if it is a terminal."""
    if stream is None or not stream.isatty():
        return stream
    stream.flush()
    terminal = _Terminal(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(terminal), stream.encoding, stream.errors, newline=None, line_buffering=True
    )
