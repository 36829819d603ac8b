"""What a run of the tests left out, in its last lines."""

from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

NO_SHARED = (
    "the folder `shared`, which is not shipped, is not beside this checkout: put a copy there; "
    "tests/golden/README.md lists what it holds"
)
DEFAULT_MARKERS = "not pod and not faults and not unsampled and not fuzz"  # as in pyproject.toml


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
        yield "not selected: tests of a pod and of faults: scripts/test.sh -m 'pod or faults' --numprocesses=0"
        yield "not selected: many inputs of each fuzzer: scripts/test.sh -m fuzz --numprocesses=0"
        yield "not selected: the rest of each product of variants: scripts/test.sh -m matrix"
