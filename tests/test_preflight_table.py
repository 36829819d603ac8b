"""The table of slices in docs/preflight.md."""

from pathlib import Path

import pytest

from scripts import preflight_table

ROW = {
    "slice": "v3-32",
    "mesh": {"pp": 1, "dp": 2, "fsdp": 4, "ep": 1, "cp": 1, "tp": 4},
    "sequences": 64,
    "step_s": 4.056,
    "step_s_range": [3.65, 4.867],
    "tokens_per_s": 32000.0,
    "mfu": 0.6214,
    "peak_gib": 9.84,
    "usable_gib": 15.48,
    "estimate": "cycles",
    "best": True,
}


def test_the_table_is_that_of_the_kept_lines(repo: Path) -> None:
    page, rows = (repo / "docs/preflight.md").read_text(), preflight_table.rows_of(preflight_table.LINES.read_text())
    assert preflight_table.render(page, rows) == page, "run python scripts/preflight_table.py"
    assert rows == preflight_table.kept(rows)
    assert len(rows) > 5


def test_the_figures_of_a_row() -> None:
    # 16 chips for 10^9 / 32,000 seconds
    expected = (
        "| v3-32 | `dp` 2, `fsdp` 4, `tp` 4 | 64 | 4.06 s | 3.65 to 4.87 s | 32,000 | 62% | 9.8 of 15.5 | 139 |\n"
    )
    assert preflight_table.table([ROW]) == preflight_table.HEAD + expected
    assert "| 4.06 s (formula) |" in preflight_table.table([ROW | {"estimate": "formula"}])


def test_the_newest_best_program_of_a_slice_is_kept() -> None:
    names = ("v5e-256", "v3-32", "v5e-8")
    old, new = ([ROW | {"slice": name, "step_s": time} for name in names] for time in (2.0, 1.0))
    found = preflight_table.kept([*old, *new, ROW | {"best": False, "step_s": 0.5}])
    assert [(row["slice"], row["step_s"]) for row in found] == [("v3-32", 1.0), ("v5e-8", 1.0), ("v5e-256", 1.0)]


@pytest.mark.parametrize("before", ["", "| old |\n"])
def test_the_page_keeps_its_other_text(before: str) -> None:
    page = f"a\n{preflight_table.BEGIN}{before}{preflight_table.END}b\n"
    once = preflight_table.render(page, [ROW])
    assert once.startswith(f"a\n{preflight_table.BEGIN}\n| slice |")
    assert once.endswith(f" 139 |\n\n{preflight_table.END}b\n")
    assert preflight_table.render(once, [ROW]) == once
