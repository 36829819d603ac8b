"""Records which test runs which lines of the package, and its CPU time: `scripts/records.sh`.

coverage measures the processes of a test too. The context of their lines is PYTEST_CURRENT_TEST, as it is when they
start (`[tool.coverage.run]` in pyproject.toml).
"""

import json
import os
import re
import resource
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

import pytest

_CPU = pytest.StashKey[float]()


def folder() -> Path:
    """Where the user's own records are."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home, "mesh-transformer-tests", "records")


class Records:
    """The records of an earlier day, which are a hint: the files have changed since. Empty if there are none.

    Attributes:
        seconds: the CPU time of each test, by its ID.
    """

    def __init__(self, path: Path):
        self._data = path / "coverage"
        lines = (line for file in path.glob("seconds-*") for line in file.read_text().splitlines())
        self.seconds: dict[str, float] = dict(map(json.loads, lines))

    def __bool__(self) -> bool:
        return self._data.exists()

    def tests_of(self, changed: Mapping[str, set[int]]) -> tuple[set[str], set[str]]:
        """The IDs of the tests that ran one of the given lines of a file, and of those that ran any line of it. Files
        are relative to the root of the checkout."""
        ran_lines: set[str] = set()
        ran_files: set[str] = set()
        if not self:
            return ran_lines, ran_files
        import coverage

        data = coverage.CoverageData(str(self._data))
        data.read()
        for file in data.measured_files():
            for name in [name for name in changed if file.endswith(f"/{name}")]:
                for number, contexts in data.contexts_by_lineno(file).items():
                    tests = {re.sub(r" \((setup|call|teardown)\)$", "", context) for context in contexts} - {""}
                    ran_files |= tests
                    if number in changed[name]:
                        ran_lines |= tests
        return ran_lines, ran_files


def _used_cpu_s() -> float:
    """The CPU time of this process, and of its children that have ended and for which it has waited."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the report of a phase its CPU time."""
    report = yield
    before, now = item.config.stash.get(_CPU, 0.0), _used_cpu_s()
    item.config.stash[_CPU] = now
    report.user_properties.append((f"cpu_s of {report.when}", round(now - before, 3) if before else 0.0))
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool, bool]:
    """While coverage measures, give the lines of each test its name, and write down its seconds."""
    measuring = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if measuring is None:
        return (yield)
    before = _used_cpu_s()
    measuring.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measuring.switch_context("")
        with (folder() / f"seconds-{os.getpid()}").open("a") as file:
            file.write(json.dumps([item.nodeid, round(_used_cpu_s() - before, 2)]) + "\n")
