"""The plugin that leaves combinations out of a default run, by the change and the commit (`support/covering.py`).

`python -m pytest --changed REV` runs only what the files that were changed since REV select: their combinations, and
the files of tests that import them.
"""

import ast
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.covering import CHANGED_SECONDS, TURNS, Choice, Product, choose

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
    choice = choose(tests, changed, commits(config.rootpath))
    for item, mark in _combinations(items):
        product, case = mark.args
        if case not in choice.cases[product]:
            item.add_marker(pytest.mark.unsampled)
    config.stash[_LINES] = list(_lines(choice, names))
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
