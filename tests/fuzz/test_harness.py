"""The harness notices each kind of bad end, also the death of its process, and goes on after it."""

import ctypes
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from fuzz import harness
from mesh_transformer.errors import UserError

FIRST, COUNT = 100, 40
# what `faulty` does with the first number of an input's `Random`, and how the harness calls it
ENDS = ["read", harness.REFUSED, "KeyError in test_harness.py", "more than 512 MiB", "process died", "hangs"]


@contextmanager
def faulty(folder: Path) -> Iterator[harness.Attempt]:
    """A fuzzer with ends of every kind, most of them good."""

    def attempt(random: Random) -> str:
        match wanted(random):
            case harness.REFUSED:
                raise UserError("no")
            case "KeyError in test_harness.py":
                raise KeyError("x")
            case "more than 512 MiB":
                assert len(b"x" * (harness.LIMIT_BYTES + (64 << 20)))
            case "process died":
                ctypes.string_at(0)
            case "hangs":
                time.sleep(600)
        return "read"

    yield attempt


def wanted(random: Random) -> str:
    return random.choices(ENDS, [20, 10, 4, 1, 1, 1])[0]


def test_every_kind_of_end_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {seed: wanted(Random(seed)) for seed in range(FIRST, FIRST + COUNT)}
    assert set(expected.values()) == set(ENDS)
    # the wait for an input that hangs, in this process
    monkeypatch.setattr(harness, "LIMIT_S", 1.0)
    report = harness.run_apart("faulty", faulty, FIRST, COUNT)
    assert Counter(kind.partition(":")[0] for kind in report.kinds.elements()) == Counter(expected.values())
    assert [end.seed for end in report.bad] == [seed for seed, end in expected.items() if end not in ENDS[:2]]
    assert f"--fuzz-seed {report.bad[0].seed}" in report.faults()
    assert f"faulty: {COUNT} inputs" in str(report)
