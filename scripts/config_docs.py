"""Write the tables of docs/config.md from the fields of the config groups. Run it after a change of a field."""

from collections.abc import Callable
from pathlib import Path

from pydantic_core import PydanticUndefined

from mesh_transformer.config import classic, describe, parse_config
from mesh_transformer.config.mesh import DIMENSIONS, SWITCHES, MeshConfig, training_rules
from mesh_transformer.config.schema import GROUPS, VARIANTS, Config
from mesh_transformer.fields import Group

TARGET = Path(__file__).resolve().parents[1] / "docs" / "config.md"
EXAMPLE = parse_config({"model": {"layers": 1, "d_model": 2, "n_heads": 1, "n_vocab": 1}, "data": {"batch_size": 1}})


def render() -> str:
    """The text of docs/config.md with new tables between its marks. The rest is written by hand."""
    text = TARGET.read_text(encoding="utf-8")
    for name, table in {
        "dimensions": "| dimension | split over | size |\n|---|---|---|\n" + "".join(map(_dimension, DIMENSIONS)),
        "fields": "".join(map(_table, GROUPS)),
    }.items():
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        text = before + begin + table + end + rest.partition(end)[2]
    return text


def _dimension(name: str) -> str:
    """The row of a named dimension: its axes, its axes with each switch that changes them, and its sizes. Empty if no
    axis splits it."""
    plain = training_rules(MeshConfig())[name]
    ways = [" x ".join(plain)] if plain else []
    for switch, rules_of in SWITCHES.items():
        if (axes := rules_of(MeshConfig(**{switch: True}))[name]) and axes != plain:
            ways.append(f"{' x '.join(axes)} with `mesh.{switch}`")
    fields = [
        f"`{size.field}`" + (f", rounded up by `{size.multiple_field}`" if size.multiple_field else "")
        for size in EXAMPLE.sizes[name]
    ]
    return f"| {name} | {'; '.join(ways)} | {', '.join(fields)} |\n" if ways else ""


def _table(name: str) -> str:
    rows = [_row(name, field) for field in GROUPS[name].model_fields]
    header = "| field | allowed | unit | default | meaning | classic key |\n|---|---|---|---|---|---|\n"
    return f"\n### {name}\n\n{Config.model_fields[name].annotation.__doc__}\n\n{header}" + "".join(rows)


def _row(name: str, field: str) -> str:
    cells = (
        f"`{name}.{field}`",
        _cell(name, field, describe.allowed),
        _cell(name, field, describe.unit),
        _cell(name, field, _default),
        _only(name, field) + _cell(name, field, _meaning),
        classic.CLASSIC_KEY.get((name, field), ""),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _cell(name: str, field: str, text: Callable[[type[Group], str], str]) -> str:
    """The text of a field. If the classes of the group differ, one text for each class that has the field."""
    variants = VARIANTS.get(name)
    if variants is None or field == variants.tag:
        return text(GROUPS[name], field)
    texts = {owner: text(variants.classes[owner], field) for owner in variants.having(field)}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{owner}: {text}" for owner, text in texts.items())


def _only(name: str, field: str) -> str:
    """The classes that have a field, unless all have it."""
    variants = VARIANTS.get(name)
    if variants is None or len(owners := variants.having(field)) == len(variants.classes):
        return ""
    return f"({', '.join(owners)}) "


def _meaning(group: type[Group], field: str) -> str:
    return " ".join((group.model_fields[field].description or "").split())


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
