"""`python -m pytest --changed REV` runs only what the files that were changed since REV select: tests that import one,
tests of its folder, and tests with its name among their parameters, such as `qwen2` for families/qwen2.py."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--changed", metavar="REV", help="only the tests that the files changed since REV select")


def changed_files(root: Path, base: str) -> set[str]:
    """The files that commits since `base` and uncommitted work changed, relative to the root."""
    names = _git(root, "diff", "--name-only", "--no-renames", base)
    return {*names, *_git(root, "ls-files", "--others", "--exclude-standard")}


def _git(root: Path, *arguments: str) -> list[str]:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise pytest.UsageError(f"--changed: git {arguments[0]} failed: {getattr(error, 'stderr', error)}") from error
    return done.stdout.splitlines()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the changed files do not select. Tests that import one come first: a fault shows soon."""
    base = config.getoption("--changed")
    if not base:
        return
    root = config.rootpath
    changed = changed_files(root, base)
    modules = [PurePosixPath(name) for name in changed if name.startswith("mesh_transformer/")]
    folders = {root / "tests" / module.parent.relative_to("mesh_transformer") for module in modules} - {root / "tests"}
    stems = {module.stem for module in modules}
    files = {item.path for item in items}
    importing = {path for path in files if imported(path, root) & changed}
    of_folder = {path for path in files if path.parent in folders}
    named = {item for item in items if stems & _parameters(item)}
    selected = [item for item in items if item.path in importing | of_folder or item in named]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(selected)])
    items[:] = sorted(selected, key=lambda item: item.path not in importing)


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
