"""What a check finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

OK, WARNING, PROBLEM = "ok", "warning", "problem"


class Finding(NamedTuple):
    """One line of the report.

    Args:
        level: OK; WARNING: a command may be slow or surprise; PROBLEM: a command will fail.
        found: what was found.
        mend: the command to run or the change to make; empty: none.
    """

    level: str
    found: str
    mend: str = ""


# a check yields one or several findings
Check = Callable[[], Iterator[Finding]]


def ok(found: str, mend: str = "") -> Finding:
    """Nothing is wrong; `mend` is for those who need more."""
    return Finding(OK, found, mend)


def warning(found: str, mend: str) -> Finding:
    """Something that may be slow or surprise."""
    return Finding(WARNING, found, mend)


def problem(found: str, mend: str) -> Finding:
    """Something that makes a command fail."""
    return Finding(PROBLEM, found, mend)
