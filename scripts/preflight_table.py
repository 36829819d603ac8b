"""Write the table of slices of docs/preflight.md from the lines that preflight.py printed.

    python scripts/preflight_table.py [FILE ...]     # FILE: the output of preflight.py --json

The best program of each slice in FILE is kept in docs/slices.jsonl, in place of the slice's earlier one. The table has
a row for each line there. Without FILE the table is written again.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, LINES = ROOT / "docs" / "preflight.md", ROOT / "docs" / "slices.jsonl"
BEGIN, END = "<!-- slices -->\n", "<!-- end of slices -->\n"
HEAD = (
    "| slice | mesh | sequences of a step | step | range | tokens/s | MFU | GiB of a device "
    "| chip-hours for 10⁹ tokens |\n"
    "|---|---|---|---|---|---|---|---|---|\n"
)
# the order of the rows
GENERATIONS = ("v3", "v4", "v5e", "v5p", "v6e")


def rows_of(text: str) -> list[dict[str, Any]]:
    """The programs of the output of `preflight.py --json`."""
    return [json.loads(line) for line in text.splitlines()]


def kept(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last `best` program of each slice, by generation and size."""
    best = {row["slice"]: row for row in rows if row["best"]}
    return sorted(best.values(), key=_order)


def _order(row: dict[str, Any]) -> tuple[int, int]:
    generation, _, size = row["slice"].partition("-")
    return GENERATIONS.index(generation), int(size)


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each program. A step that was not compiled says so."""
    return HEAD + "".join(_line(row) for row in rows)


def _line(row: dict[str, Any]) -> str:
    from mesh_transformer.slices import parse

    mesh = ", ".join(f"`{axis}` {size}" for axis, size in row["mesh"].items() if size > 1)
    formula = " (formula)" if row["estimate"] == "formula" else ""
    low, high = row["step_s_range"]
    chip_hours = parse(row["slice"]).chips * 1e9 / row["tokens_per_s"] / 3600
    cells = (
        row["slice"],
        mesh,
        f"{row['sequences']:,}",
        f"{row['step_s']:.2f} s{formula}",
        f"{low:.2f} to {high:.2f} s",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['mfu']:.0%}",
        f"{row['peak_gib']:.1f} of {row['usable_gib']:.1f}",
        f"{chip_hours:,.0f}",
    )
    return f"| {' | '.join(cells)} |\n"


def render(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Keep the lines of the files, and write the table."""
    # the package beside this file, whichever one is installed
    sys.path.insert(0, str(ROOT))
    texts = [Path(file).read_text(encoding="utf-8") for file in (LINES, *sys.argv[1:])]
    rows = kept([row for text in texts for row in rows_of(text)])
    LINES.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
