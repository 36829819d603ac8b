"""Runs a fuzzer: makes mutated inputs from seeds, reads them, and counts the kinds of ends.

A fuzzer is a context manager that prepares a folder and gives a function `attempt(random) -> end`. The function mutates
a valid input, reads it with the function that a command uses, and returns how that ended. A UserError is a refusal. Any
other exception, more than LIMIT_S seconds of the processor or more than LIMIT_BYTES of memory is a bad end, and so is
the death of the process.
"""

import collections
import contextlib
import dataclasses
import multiprocessing
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import NamedTuple

from mesh_transformer.errors import UserError

# of one input
LIMIT_S = 10.0
LIMIT_BYTES = 512 << 20
# address space that a process may add while it reads: an allocation of more fails before it fills the machine
_ROOM_BYTES = 4 << 30
# until a process is ready to read the first input: imports
_START_S = 180.0
_READY = "ready"
# bad ends of a run, after which it ends
_MOST_BAD = 20
REFUSED = "refused"

Attempt = Callable[[Random], str]
Fuzzer = Callable[[Path], AbstractContextManager[Attempt]]


class End(NamedTuple):
    """How the reading of one input ended; `fault` is empty unless it is a bad end."""

    seed: int
    kind: str
    peak_bytes: int
    fault: str = ""


@dataclasses.dataclass
class Report:
    """The ends of a run. Peaks are of the memory of the process."""

    name: str
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bad: list[End] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0

    def add(self, end: End) -> None:
        self.kinds[end.kind] += 1
        self.peak_bytes = max(self.peak_bytes, end.peak_bytes)
        if end.fault:
            self.bad.append(end)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        total = self.kinds.total()
        return f"{self.name}: {total} inputs, {self.seconds:.0f} s, peak {self.peak_bytes >> 20} MiB; {kinds}"

    def faults(self) -> str:
        """The bad ends, each with the command that repeats it."""
        repeat = f"repeat: python -m pytest -m fuzz tests/fuzz -k '{self.name}' --fuzz-count 1 --fuzz-seed"
        return "\n".join(
            f"{self.name}, seed {end.seed}: {end.kind}\n{end.fault}\n{repeat} {end.seed}\n" for end in self.bad
        )


def run_here(name: str, fuzzer: Fuzzer, folder: Path, first: int, count: int) -> Report:
    """Read the inputs of `count` seeds from `first` on, in this process."""
    report, began = Report(name), time.monotonic()
    with fuzzer(folder) as attempt:
        for seed in range(first, first + count):
            report.add(_end(attempt, seed))
    report.seconds = time.monotonic() - began
    return report


def run_apart(name: str, fuzzer: Fuzzer, first: int, count: int) -> Report:
    """The same in another process, which may die or hang: that is the end of one input, and a new process goes on."""
    report, began, seed = Report(name), time.monotonic(), first
    while seed < first + count and len(report.bad) < _MOST_BAD:
        for end in _ends_apart(fuzzer, seed, first + count - seed):
            report.add(end)
            seed = end.seed + 1
    report.seconds = time.monotonic() - began
    return report


def _end(attempt: Attempt, seed: int) -> End:
    _forget_peak()
    before, began, fault = _peak_bytes(), time.process_time(), ""
    try:
        kind = attempt(Random(seed))
    except UserError:
        kind = REFUSED
    except KeyboardInterrupt:
        raise
    # a panic of a Rust library is no Exception
    except BaseException as error:  # noqa: BLE001
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}"
        fault = "".join(traceback.format_exception(error, limit=-8))[-4000:]
    seconds, peak = time.process_time() - began, _peak_bytes()
    if seconds > LIMIT_S:
        kind, fault = f"more than {LIMIT_S:g} CPU s", fault or f"{kind} after {seconds:.1f} s"
    elif peak - before > LIMIT_BYTES:
        kind, fault = f"more than {LIMIT_BYTES >> 20} MiB", fault or f"{kind} with {(peak - before) >> 20} MiB more"
    return End(seed, kind, peak, fault)


def _peak_bytes() -> int:
    """The largest resident memory of this process since `_forget_peak`, or since its start."""
    try:
        # getrusage also counts the process that started this one
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def _forget_peak() -> None:
    """Begin to measure the peak anew, where the system can."""
    with contextlib.suppress(OSError):
        # proc_pid_clear_refs(5): 5 resets the peak alone
        Path("/proc/self/clear_refs").write_text("5")


def _ends_apart(fuzzer: Fuzzer, first: int, count: int) -> Iterator[End]:
    """The ends that a new process sends, and the end of the input at which it dies or hangs.

    Raises:
        RuntimeError: the process could not prepare the first input.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_ends, args=(fuzzer, first, count, sender), daemon=True)
    process.start()
    sender.close()
    seed, peak, wait_s = first, 0, 2 * LIMIT_S
    try:
        if not _is_ready(receiver):
            raise RuntimeError(f"the fuzzer of {fuzzer.__module__} did not start: its standard error has the reason")
        while seed < first + count:
            # a reader that hangs inside a library cannot be interrupted there
            if not receiver.poll(wait_s):
                yield End(seed, "hangs", peak, f"no end after {wait_s:g} s")
                return
            end: End = receiver.recv()
            yield end
            seed, peak = end.seed + 1, end.peak_bytes
        # it ends what it started, such as a server
        process.join(_START_S)
        if process.exitcode != 0:
            yield End(seed - 1, "process fails at its end", peak, f"exit code {process.exitcode}")
    except EOFError:
        process.join()
        yield End(seed, "process died", peak, f"exit code {process.exitcode}")
    finally:
        process.kill()
        process.join()
        receiver.close()


def _is_ready(receiver: Connection) -> bool:
    try:
        return receiver.poll(_START_S) and receiver.recv() == _READY
    except EOFError:
        return False


def _send_ends(fuzzer: Fuzzer, first: int, count: int, sender: Connection) -> None:
    with tempfile.TemporaryDirectory() as folder, fuzzer(Path(folder)) as attempt:
        _limit_room()
        sender.send(_READY)
        for seed in range(first, first + count):
            sender.send(_end(attempt, seed))


def _limit_room() -> None:
    """Limit the address space to what is in use and _ROOM_BYTES more, where the system says what is in use."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        used = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + _ROOM_BYTES, used + _ROOM_BYTES))
