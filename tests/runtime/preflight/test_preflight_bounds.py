"""benchmarks/bounds.py: its rows, its judgement, and the time of its programs."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mesh_transformer.config import load_config
from mesh_transformer.errors import UserError
from mesh_transformer.estimate.target import tpu_target

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def _bounds() -> ModuleType:
    # common.py extends the path, and so does this function
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("bounds")
    finally:
        sys.path[:] = before


bounds = _bounds()
PINNED = {name: row.step_s for name, row in bounds.ROWS.items() if row.step_s is not None}


@pytest.mark.parametrize("name", bounds.ROWS)
def test_a_row_is_a_program(repo, name):
    row = bounds.ROWS[name]
    config = load_config(str(repo / f"configs/{row.config}.json"), row.overrides)
    shape = config.check_devices(tpu_target(row.slice).n_devices)
    sequences = config.optimizer.gradient_accumulation_steps * config.microbatch(shape)
    assert sequences == {"v3-256": 64, "v3-512": 64, "v4-64": 256}.get(row.slice, 16)
    assert set(row.bounds) <= {"step_s", "token_ms", "mfu", "peak_gib"}
    assert row.bounds or row.step_s


def test_a_value_may_exceed_its_bound_by_two_percent():
    row = bounds.Row("v3-8", (), {"step_s": 4.0, "mfu": 0.51, "peak_gib": 14.0}, None)
    found = {"program": "train", "step_s": 4.07, "mfu": 0.501, "peak_gib": 14.5, "set": ["mesh.tp=2"]}
    lines = bounds.judge("a", row, found)
    assert [(line["figure"], line["value"], line["pass"]) for line in lines] == [
        ("step_s", 4.07, True),
        ("mfu", 0.501, True),
        ("peak_gib", 14.5, False),
    ]
    assert lines[0] == {
        "row": "a", "figure": "step_s", "value": 4.07, "bound": 4.0, "pass": True, "set": ["mesh.tp=2"]
    }  # fmt: skip
    assert [line["pass"] for line in bounds.judge("a", row, found | {"step_s": 4.09, "mfu": 0.49})] == [False] * 3


def test_a_call_of_the_server_samples_16_tokens():
    found = {"program": "decode", "step_s": 0.16, "set": []}
    (line,) = bounds.judge("d", bounds.ROWS["decode_8"], found)
    assert (line["value"], line["pass"]) == (pytest.approx(10.0), False)


def test_a_program_that_does_not_fit_keeps_no_bound():
    assert [line["pass"] for line in bounds.judge("v3-8", bounds.ROWS["v3-8"], None)] == [False] * 3


def test_an_unknown_row(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["bounds.py", "v3-9"])
    with pytest.raises(UserError, match="unknown row 'v3-9': expected one of v3-8_tp, "):
        bounds.main()


@pytest.mark.usefixtures("libtpu")
@pytest.mark.tpu
@pytest.mark.nightly
@pytest.mark.parametrize("name", PINNED)
def test_the_time_of_a_program(name):
    """A figure that falls needs a new value in the table, as one that rises needs a reason."""
    assert bounds.measure(bounds.ROWS[name])["step_s"] == pytest.approx(PINNED[name], rel=0.02)
