"""The programs of an engine by what they compute, and a thread that compiles them. No jax."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple


class Prefill(NamedTuple):
    """Computes prompt chunks.

    Args:
        rows: chunks of the batch; there may be fewer.
        size: positions of a chunk.
        length: positions of the cache that attention reads. With `length` equal to `size` a chunk starts its prompt.
        scored: whether the log-probabilities of the prompt's tokens are returned.
    """

    rows: int
    size: int
    length: int
    scored: bool = False


class Generate(NamedTuple):
    """Generates tokens.

    Args:
        single: for one slot, else for all.
        length: positions of the cache that attention reads.
    """

    single: bool
    length: int


Program = Prefill | Generate


class ProgramCounts(NamedTuple):
    """Programs that are compiled, and those that will be."""

    compiled: int
    compiling: int


class CompileThread(threading.Thread):
    """Compiles programs one after the other, so that the thread that serves never does.

    Args:
        compile: compiles a program.
        programs: in the order in which they are compiled.
        on_compiled: called after each program, and after the failure of one.
    """

    def __init__(
        self, compile: Callable[[Program], object], programs: Iterable[Program], on_compiled: Callable[[], None]
    ):
        super().__init__(name="compile", daemon=True)
        self._compile, self._on_compiled = compile, on_compiled
        self._changed = threading.Condition()
        self._programs = collections.deque(programs)
        self._current: Program | None = None
        self._closed = False
        # why the compilation of a program failed
        self.failure: BaseException | None = None

    def want(self, program: Program) -> None:
        """Compile this program next."""
        with self._changed:
            if program != self._current:
                if program in self._programs:
                    self._programs.remove(program)
                self._programs.appendleft(program)
                self._changed.notify()

    @property
    def left(self) -> int:
        """Programs that are not compiled yet."""
        with self._changed:
            return len(self._programs) + (self._current is not None)

    def close(self) -> bool:
        """Begin no further compilation. Returns whether none runs: one that runs cannot be interrupted."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            return self._current is None

    def run(self) -> None:
        """Compile until `close`."""
        while (program := self._next()) is not None:
            try:
                self._compile(program)
            except BaseException as error:  # noqa: BLE001  (the thread that needs the program raises it)
                self.failure = error
            with self._changed:
                self._current = None
            self._on_compiled()

    def _next(self) -> Program | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._programs and self.failure is None))
            self._current = None if self._closed else self._programs.popleft()
            return self._current
