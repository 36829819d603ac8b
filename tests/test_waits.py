"""No test limits wall time below a minute: a busy machine is no fault. Limits that a test waits out are short."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import waiting

TESTS = Path(__file__).parent
# a limit that is meant to be reached is at most so long, seconds
REACHED_S = 2
LIMITED = {"wait", "join", "result", "acquire"}


def short_limits(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions that limit wall time to less than a minute."""
    elapsed = {
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _reads_clock(node.value)
        for name in node.targets
        if isinstance(name, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from _compared(node, elapsed)
        elif isinstance(node, ast.Call):
            limits = [keyword.value for keyword in node.keywords if "timeout" in (keyword.arg or "")]
            if isinstance(node.func, ast.Attribute) and node.func.attr in LIMITED:
                limits += node.args[:1]
            yield from filter(_is_short, limits)
        elif isinstance(node, ast.FunctionDef):
            defaults = [*zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)]
            defaults += zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            yield from (value for name, value in defaults if value and "timeout" in name.arg and _is_short(value))


def _compared(node: ast.Compare, elapsed: set[str]) -> Iterator[ast.expr]:
    """The upper bounds of a comparison of a time that has passed."""
    sides = itertools.pairwise([node.left, *node.comparators])
    for (left, right), operator in zip(sides, node.ops, strict=True):
        less, more = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
        names = {name.id for name in ast.walk(less) if isinstance(name, ast.Name)}
        ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
        if ordered and _is_number_below_60(more) and (_reads_clock(less) or names & elapsed):
            yield more


def _reads_clock(node: ast.AST) -> bool:
    clocks = {"time.monotonic", "time.perf_counter", "time.time"}
    return any(isinstance(part, ast.Call) and ast.unparse(part.func) in clocks for part in ast.walk(node))


def _is_number_below_60(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value < 60


def _is_short(node: ast.expr) -> bool:
    return _is_number_below_60(node) and node.value > REACHED_S


def test_no_limit_of_wall_time_is_short() -> None:
    limits = [
        f"{path.relative_to(TESTS)}:{limit.lineno}: {ast.unparse(limit)}"
        for path in sorted(TESTS.rglob("*.py"))
        for limit in short_limits(ast.parse(path.read_text()))
    ]
    assert not limits, f"use support.waiting: until, or LONG_S ({waiting.LONG_S:.0f} s)"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("assert time.monotonic() - began < 5", 1),
        ("took = time.monotonic() - began\nassert 1 < took <= 8", 1),
        ("assert 5 > time.perf_counter() - began", 1),
        ("assert time.monotonic() - began > 2", 0),
        ("thread.join(10)", 1),
        ("child.wait(timeout=5)", 1),
        ("def wait(process, timeout_s=20): ...", 1),
        ("def wait(process, *, timeout_s=20): ...", 1),
        ("pod.run('sleep 9', timeout_s=1)", 0),
        ("thread.join(LONG_S)", 0),
    ],
)
def test_what_counts_as_a_short_limit(source: str, count: int) -> None:
    assert len(list(short_limits(ast.parse(source)))) == count
