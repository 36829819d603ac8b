"""`python -m pytest --changed REV` runs only what the files that were changed since REV select, the nearest first:

1. tests that are changed themselves or import a changed file, and tests with its name among their parameters, such as
   `qwen2` for families/qwen2.py
2. tests of its folder: tests/ mirrors the package
3. tests that ran a changed line of it, and then those that ran another line, by the records of support/recorded.py

By these records, the selected tests take at most five minutes of CPU time.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from support.recorded import Records, folder

PACKAGE = "mesh_transformer"
CPU_S = 300.0
# of a test that is not in the records
UNKNOWN_S = 1.0
_LINES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", metavar="REV", help="only the tests that the files changed since REV select")


def changed_lines(root: Path, base: str) -> dict[str, set[int]]:
    """The files that commits since `base` and uncommitted work changed, relative to the root, each with the numbers of
    its changed lines, as they are now."""
    names = _git(root, "diff", "--name-only", "--no-renames", base)
    names += _git(root, "ls-files", "--others", "--exclude-standard")
    lines: dict[str, set[int]] = {name: set() for name in names}
    name = ""
    for line in _git(root, "diff", "--unified=0", "--no-renames", "--no-ext-diff", base):
        if line.startswith("+++ "):
            name = line.removeprefix("+++ ").removeprefix("b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            # where lines were only deleted, the one before them
            lines.get(name, set()).update(range(first, first + max(count, 1)))
    return lines


def _git(root: Path, *arguments: str) -> list[str]:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError(f"--changed: git {arguments[0]} failed: {getattr(error, 'stderr', error)}") from error
    return done.stdout.splitlines()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the changed files do not select, after -m and -k have left out theirs."""
    base = config.getoption("--changed")
    if not base:
        return
    root = config.rootpath
    records = Records(folder())
    ranks = _ranks(items, root, changed_lines(root, base), records)
    selected, seconds = [], 0.0
    for item in sorted(ranks, key=lambda item: (ranks[item], records.seconds.get(item.nodeid, 0.0))):
        seconds += records.seconds.get(item.nodeid, UNKNOWN_S) if records else 0.0
        if seconds > CPU_S:
            break
        selected.append(item)
    left_out = len(ranks) - len(selected)
    lines = [f"--changed {base}: {len(selected)} tests"]
    if not records:
        lines.append(
            "chosen by folder and import alone, without records of the lines that each test runs (scripts/records.sh)"
        )
    if left_out:
        lines.append(f"left out: {left_out} tests that run changed files too, after {CPU_S:.0f} s of CPU time")
    config.stash[_LINES] = lines
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    items[:] = selected


def _ranks(
    items: list[pytest.Item], root: Path, changed: dict[str, set[int]], records: Records
) -> dict[pytest.Item, int]:
    """The tests that the changed files select, each with its distance."""
    modules = [PurePosixPath(name) for name in changed if PurePosixPath(name).parts[0] == PACKAGE]
    stems = {module.stem for module in modules}
    importing = {path for path in {item.path for item in items} if imported(path, root) & changed.keys()}
    folders = [(folder_of_tests(module, root), len(module.parts) == 2) for module in modules]
    ran_lines, ran_files = records.tests_of({name: changed[name] for name in map(str, modules)})
    ranks = {}
    for item in items:
        if item.path in importing or stems & _parameters(item):
            ranks[item] = 1
        elif any(
            item.path.parent == folder or (not alone and folder in item.path.parents) for folder, alone in folders
        ):
            ranks[item] = 2
        elif item.nodeid in ran_lines:
            ranks[item] = 3
        elif item.nodeid in ran_files:
            ranks[item] = 4
    return ranks


def folder_of_tests(module: PurePosixPath, root: Path) -> Path:
    """The folder with the tests of a file of the package: of its own folder, or of the next one above."""
    folder = root / "tests" / module.parent.relative_to(PACKAGE)
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _parameters(item: pytest.Item) -> set[str]:
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else {value for value in callspec.params.values() if isinstance(value, str)}


def imported(path: Path, root: Path) -> set[str]:
    """The files that a file of tests imports itself or through tests/support, relative to the root; with itself."""
    files, left = {path}, [path]
    while left:
        names = {
            f"{module}.{alias}" if alias else module
            for node in ast.walk(ast.parse(left.pop().read_text()))
            for module, alias in _imports(node)
        }
        for name in names:
            place = name.replace(".", "/")
            for file in (root / f"{place}.py", root / place / "__init__.py", root / f"tests/{place}.py"):
                if file not in files and file.is_file():
                    files.add(file)
                    if file.is_relative_to(root / "tests"):
                        left.append(file)
    return {file.relative_to(root).as_posix() for file in files}


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, ""
        yield from ((node.module, alias.name) for alias in node.names)


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say what was selected."""
    return config.stash.get(_LINES, [])
