"""The last lines of a run of the tests: the seconds of each folder, its memory, and what was left out."""

import re
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import pytest

NO_SHARED = (
    "the folder `shared`, which is not shipped, is not beside this checkout: put a copy there; "
    "tests/golden/README.md lists what it holds"
)
DEFAULT_MARKERS = "not pod and not faults and not nightly and not fuzz"  # as in pyproject.toml


def closing_lines(skipped: Iterable[pytest.TestReport], markers: str) -> Iterator[str]:
    """How many tests were skipped for which reason, and which were not selected. Each line says how to run them.

    Args:
        skipped: reports of skipped tests; their reasons say how to run them.
        markers: the expression that selected the tests (`-m`).
    """
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, tests in reasons.most_common():
        yield f"{tests} skipped: {reason}"
    if markers == DEFAULT_MARKERS:
        yield "not selected: tests of a pod and of faults: scripts/test.sh -m 'pod or faults'"
        yield "not selected: what runs at night: .ci/nightly"


def seconds_by_folder(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """The wall time and the CPU time of the tests of each folder, the longest first. Workers run beside each other."""
    seconds, cpu_seconds = Counter[str](), Counter[str]()
    for report in reports:
        folder = str(PurePosixPath(report.nodeid.partition("::")[0]).parent)
        seconds[folder] += report.duration
        cpu_seconds[folder] += cpu_s_of(report)
    for folder, total in seconds.most_common():
        yield f"{total:8.1f} s {cpu_seconds[folder]:8.1f} CPU s  {folder}"


def real_seconds(reports: Iterable[pytest.TestReport], limits: Path) -> Iterator[str]:
    """The CPU time of the tests with a trained model, beside its limit in scripts/budgets.toml. Nothing if none ran."""
    total = sum(cpu_s_of(report) for report in reports if "real" in report.keywords)
    if total:
        limit = tomllib.loads(limits.read_text())["CPU seconds"]["tests marked real"]
        over = ", over it: make them cheaper" if total > limit else ""
        yield f"tests marked real: {total:.0f} CPU s; the limit is {limit}{over}"


def cpu_s_of(report: pytest.TestReport) -> float:
    """The CPU time of a phase of a test, from `recorded`."""
    return float(dict(report.user_properties).get(f"cpu_s of {report.when}", 0.0))


class PeakMemory:
    """The most memory that the machine has used more than now, sampled each second by a thread."""

    def __init__(self) -> None:
        self._first = self._least = self._available()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            self._least = min(self._least, self._available())

    @staticmethod
    def _available() -> int:
        """In KiB; 0 where the kernel is not Linux."""
        try:
            (kib,) = re.findall(r"^MemAvailable: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            return 0
        return int(kib)

    def __str__(self) -> str:
        return f"peak memory of all processes: {(self._first - self._least) / 1e6:.1f} GB"
