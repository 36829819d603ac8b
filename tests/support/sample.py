"""The plugin that leaves combinations and slow tests out of a default run, by the change and the commit
(`support/covering.py`).

`python -m pytest --changed REV` runs only what the files that were changed since REV select: their combinations, and
the files of tests that import them.
"""

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.covering import CHANGED_SECONDS, TURNS, Choice, Product, choose, some_slow

# commits that are no older than this before HEAD landed with it: a session's commits
LANDED_SECONDS = 3 * 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", metavar="REV", help="only the tests that the files changed since REV select")


def changed_files(folder: Path, base: str | None = None) -> list[str]:
    """Files that commits since `base`, None: the last landed commits, and uncommitted work changed; relative to the
    root. None without git."""
    try:
        if base is None:
            now = int(_git(folder, "log", "-1", "--format=%ct"))
            base = _git(folder, "rev-list", "-1", f"--before={now - LANDED_SECONDS}", "HEAD") or "HEAD"
        changed = _git(folder, "diff", "--name-only", "--no-renames", base)
        return [*changed.splitlines(), *_git(folder, "ls-files", "--others", "--exclude-standard").splitlines()]
    except (OSError, subprocess.CalledProcessError):
        return []


def commits(folder: Path) -> int:
    """The number of commits up to HEAD; 0 without git."""
    try:
        return int(_git(folder, "rev-list", "--count", "HEAD"))
    except (OSError, subprocess.CalledProcessError):
        return 0


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the combinations that this run leaves out, before pytest selects by marks."""
    tests: dict[Product, str] = {}
    names: dict[Product, str] = {}
    for item, mark in _combinations(items):
        tests[mark.args[0]] = item.path.relative_to(config.rootpath).as_posix()
        names[mark.args[0]] = item.nodeid.partition("[")[0]
    base = config.getoption("--changed")
    changed = changed_files(config.rootpath, base)
    turn = commits(config.rootpath)
    choice = choose(tests, changed, turn)
    for item, mark in _combinations(items):
        product, case = mark.args
        if case not in choice.cases[product]:
            item.add_marker(pytest.mark.unsampled)
    config.stash[_LINES] = [*_lines(choice, names), *_leave_out_slow(items, config.rootpath, changed, turn)]
    if hasattr(config, "workeroutput"):
        config.workeroutput["sample"] = config.stash[_LINES]
    if base:
        files = {item.path for item in items}
        selected = {path for path in files if imported(path, config.rootpath).intersection(changed)}
        paths = selected | {config.rootpath / tests[product] for product in choice.changed}
        config.hook.pytest_deselected(items=[item for item in items if item.path not in paths])
        # files that import a changed file come first, then cheap combinations: a fault shows soon
        seconds = {item: mark.args[0].seconds for item, mark in _combinations(items)}
        usual = sorted(seconds.values())[len(seconds) // 2] if seconds else 0.0
        items[:] = sorted(
            (item for item in items if item.path in paths),
            key=lambda item: (item.path not in selected, seconds.get(item, usual)),
        )


def _leave_out_slow(items: Sequence[pytest.Item], root: Path, changed: Sequence[str], turn: int) -> list[str]:
    """Mark the slow tests outside products that this run leaves out. The lines say how many they are.

    Tests of pods and of faults, which run alone, have turns of their own.
    """
    slow = [item for item in items if _has(item, "slow") and not _has(item, "matrix", "tpu")]
    groups = {
        "of commands": [item for item in slow if not _has(item, "pod", "faults")],
        "of pods and of faults": [item for item in slow if _has(item, "pod", "faults")],
    }
    for item in groups["of commands"]:
        item.add_marker(pytest.mark.matrix)
    lines = []
    for kind, tests in groups.items():
        files = {path.relative_to(root).as_posix(): path for path in {item.path for item in tests}}
        counts = Counter(item.path.relative_to(root).as_posix() for item in tests)
        over_change = [name for name, path in files.items() if not imported(path, root).isdisjoint(changed)]
        taken = {files[name] for name in some_slow(counts, over_change, turn)}
        left = [item for item in tests if item.path not in taken]
        for item in left:
            item.add_marker(pytest.mark.unsampled)
        if left:
            lines.append(f"slow tests {kind}: {len(left)} of {len(tests)} wait for the next commit")
    return lines


def _has(item: pytest.Item, *marks: str) -> bool:
    return any(item.get_closest_marker(mark) for mark in marks)


def imported(path: Path, root: Path) -> set[str]:
    """The files that a file of tests imports itself or through tests/support, relative to the root; with itself."""
    found, left = {path}, [path]
    while left:
        names = {
            f"{module}.{alias}" if alias else module
            for node in ast.walk(ast.parse(left.pop().read_text()))
            for module, alias in _imports(node)
        }
        for name in names:
            place = name.replace(".", "/")
            for file in (root / f"{place}.py", root / f"tests/{place}.py"):
                if file not in found and file.is_file():
                    found.add(file)
                    if file.is_relative_to(root / "tests"):
                        left.append(file)
    return {file.relative_to(root).as_posix() for file in found}


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, ""
        yield from ((node.module, alias.name) for alias in node.names)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take the lines of one worker of pytest-xdist: the lines of all workers are equal."""
    node.config.stash[_LINES] = getattr(node, "workeroutput", {}).get("sample", [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what the run tested of its products."""
    for line in config.stash.get(_LINES, []):
        terminalreporter.write_line(line)


_LINES = pytest.StashKey[list[str]]()


def _combinations(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, pytest.Mark]]:
    for item in items:
        # without arguments: a test of many inputs, which is no product
        if (mark := item.get_closest_marker("matrix")) and mark.args:
            yield item, mark


def _lines(choice: Choice, names: dict[Product, str]) -> Iterator[str]:
    if not choice.cases:
        return
    for name in dict.fromkeys(names[product] for product in choice.changed):
        counts = [count for product, count in choice.changed.items() if names[product] == name]
        taken, found = (sum(numbers) for numbers in zip(*counts, strict=True))
        yield f"products of variants: {taken} of {found} that test a changed file: {name}"
    taken, found = (sum(map(len, sizes)) for sizes in (choice.cases.values(), (one.cases for one in choice.cases)))
    yield (
        f"products of variants: {taken} of {found} combinations, for changed files {CHANGED_SECONDS} s of CPU at most; "
        f"any {2 * TURNS - 1} commits in a row cover each product"
    )
