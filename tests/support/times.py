"""Where the time of tests goes, by file: `python -m pytest --times FILE` writes a table as JSON and prints its top.

Columns, in seconds:
    wall: from the start of a test to its end, and the import of the file
    compiling: of these, those in which JAX traced, lowered, compiled, or read a program from the cache
    processes: CPU of child processes that have ended
    own: CPU of the process that runs the tests, compiling included
    waiting: wall without own: for child processes, sockets, timers, and for a core
"""

import json
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COLUMNS = ("wall", "compiling", "processes", "own", "waiting")
PRINTED = 25  # files


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE", help="write where the time of each test file went, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--times"):
        config.pluginmanager.register(Times(config))


class Times:
    """The plugin. In a run of several processes each worker measures its own tests, and the controller adds them up."""

    def __init__(self, config: pytest.Config):
        import jax.monitoring  # only now: conftest.py chooses the devices before jax is imported

        self.config = config
        self.files: dict[str, Counter[str]] = defaultdict(Counter)
        self._compiled: list[tuple[float, float]] = []  # start and end of each phase
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.monotonic()
            self._compiled.append((now - duration, now))

    @contextmanager
    def _measured(self, path: Path) -> Iterator[None]:
        name = str(path.relative_to(self.config.rootpath))
        start, own, processes = time.monotonic(), time.process_time(), _children()
        self._compiled.clear()
        try:
            yield
        finally:
            wall, own = time.monotonic() - start, time.process_time() - own
            compiling = covered((max(begin, start), end) for begin, end in list(self._compiled))
            seconds = (wall, compiling, _children() - processes, own, max(0.0, wall - own))
            self.files[name].update(dict(zip(COLUMNS, seconds, strict=True)))

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Generator[None, Any, Any]:
        if not isinstance(collector, pytest.Module):
            return (yield)
        with self._measured(collector.path):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        with self._measured(item.path):
            return (yield)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, seconds in getattr(node, "workeroutput", {}).get("times", {}).items():
            self.files[name].update(seconds)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["times"] = {name: dict(seconds) for name, seconds in self.files.items()}
        else:
            rounded = {name: {key: round(value, 2) for key, value in self.files[name].items()} for name in self.files}
            Path(self.config.getoption("--times")).write_text(json.dumps(rounded, indent=1))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds by file")
        for line in table(self.files):
            terminalreporter.write_line(line)


def table(files: dict[str, Counter[str]]) -> Iterator[str]:
    """The slowest files, every folder, and all."""
    folders: dict[str, Counter[str]] = defaultdict(Counter)
    for name, seconds in files.items():
        folders[str(Path(name).parent)].update(seconds)
        folders["all"].update(seconds)
    yield "".join(f"{column:>10}" for column in COLUMNS)
    for rows, count in ((files, PRINTED), (folders, len(folders))):
        for name in sorted(rows, key=lambda name: -rows[name]["wall"])[:count]:
            yield "".join(f"{rows[name][column]:10.1f}" for column in COLUMNS) + f"  {name}"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of spans: the trace of a function holds those of the functions that it calls."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
