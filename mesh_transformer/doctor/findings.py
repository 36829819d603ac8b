"""The findings of a check: the lines of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    """One line of the report.

    Args:
        level: OK; WARNING: a command may be slow or surprise; PROBLEM: a command will fail.
        found: the state of the machine that the check found.
        mend: the command to run or the change to make; empty: none.
    """

    level: str
    found: str
    mend: str = ""


# a check yields one or several findings
Check = Callable[[], Iterator[Finding]]


def ok(text: str, mend: str = "") -> Finding:
    """A state without a fault. `mend` is optional advice."""
    return Finding(OK, text, mend)


def warning(text: str, mend: str) -> Finding:
    """A state that may make a command slow or surprising."""
    return Finding(WARNING, text, mend)


def problem(text: str, mend: str) -> Finding:
    """A state that makes a command fail."""
    return Finding(PROBLEM, text, mend)
