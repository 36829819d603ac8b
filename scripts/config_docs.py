"""Write the tables of docs/config.md from the fields of the config groups. Run it after changing a field."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import PydanticUndefined

from mesh_transformer.config import classic, describe
from mesh_transformer.config.schema import GROUPS
from mesh_transformer.fields import Group

TARGET = Path(__file__).resolve().parents[1] / "docs" / "config.md"
# the tables stand between these lines of the page; all else there is written by hand
BEGIN = "<!-- fields -->\n"
END = "\n<!-- end of fields -->\n"


def render() -> str:
    """The text of docs/config.md with its tables made anew."""
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "".join(_table(name, group) for name, group in GROUPS.items()) + END + after


def _table(name: str, group: type[Group]) -> str:
    rows = [_row(name, group, field) for field in group.model_fields]
    header = "| field | allowed | unit | default | meaning | classic key |\n|---|---|---|---|---|---|\n"
    return f"\n### {name}\n\n{group.__doc__}\n\n{header}" + "".join(rows)


def _row(name: str, group: type[Group], field: str) -> str:
    cells = (
        f"`{name}.{field}`",
        describe.allowed(group, field),
        describe.unit(group, field),
        _default(group, field),
        group.model_fields[field].description or "",
        classic.CLASSIC_KEY.get((name, field), ""),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _default(group: type[Group], field: str) -> str:
    if rule := describe.derived(group, field):
        return f"`{rule}`"
    default = group.model_fields[field].get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "-"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    return "none" if default in (None, "", (), {}) else str(default)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
