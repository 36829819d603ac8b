"""Write the tables of docs/config.md from the fields of the config groups. Run it after a change of a field."""

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from pydantic_core import PydanticUndefined

from mesh_transformer.config import classic, describe, parse_config
from mesh_transformer.config.mesh import DIMENSIONS, SWITCHES, MeshConfig, training_rules
from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.config.schema import GROUPS, VARIANTS, Config
from mesh_transformer.fields import PIPELINED, ConfigGroup

COLUMNS = 120
TARGET = Path(__file__).resolve().parents[1] / "docs" / "config.md"
# a family that has all dimensions
MODEL = {
    "family": "mixtral",
    "layers": 1,
    "d_model": 2,
    "n_heads": 1,
    "n_vocab": 1,
    "n_experts": 1,
    "experts_per_token": 1,
}
EXAMPLE = parse_config({"model": MODEL, "data": {"batch_size": 1}})


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
    if name == "kv_heads":
        return f"| {name} | {'; '.join(ways)} | `model.n_kv_heads`; whole if the axis does not divide it |\n"
    if name == PIPELINED:
        return f"| {name} | {'; '.join(ways)} | the repeats of a group of `model.layers` |\n"
    fields = [
        f"`{size.field}`" + (f", rounded up by `{size.multiple_field}`" if size.multiple_field else "")
        for size in EXAMPLE.sizes.get(name, [])
    ]
    return f"| {name} | {'; '.join(ways)} | {', '.join(fields)} |\n" if ways else ""


def _table(name: str) -> str:
    """The section of a group. A group with variants has a table of the common fields, and one for each class."""
    variants, about = VARIANTS.get(name), Config.model_fields[name].annotation.__doc__
    if variants is None:
        text = f"\n### {name}\n\n{about}\n\n{_rows(name, GROUPS[name], GROUPS[name].model_fields)}"
        return text + (_sources() if name == "data" else "")
    classes = variants.classes
    common = [
        field
        for field in GROUPS[name].model_fields
        if field != variants.tag and len(variants.having(field)) == len(classes)
    ]
    chosen_by = f"- `{name}.{variants.tag}` selects the class: {', '.join(classes)}; default {next(iter(classes))}"
    tag = f"{_filled(chosen_by, '  ')}\n\n"
    text = f"\n### {name}\n\n{about}\n\n{tag}{_rows(name, next(iter(classes.values())), common)}"
    rows: dict[str, dict[str, str]] = {}
    for chosen, group in classes.items():
        own = [field for field in group.model_fields if field not in common and field != variants.tag]
        text += f"\n#### {name}.{variants.tag} = {chosen}\n\n{_first_line(group)}\n\n"
        rows[chosen] = {field: _row(name, group, field) for field in own}
        if same := _shared(chosen, rows):
            nearest, fields = same
            text += _filled(f"As in {nearest}: {', '.join(f'`{field}`' for field in fields)}.") + "\n\n"
            own = [field for field in own if field not in fields]
        if own:
            text += _rows(name, group, own)
    return text


def _sources() -> str:
    """The section of a source of a mixture."""
    rows = _rows("data.train_set.NAME", TrainSource, TrainSource.model_fields)
    return f"\n#### data.train_set as a mixture\n\n{_first_line(TrainSource)}\n\n{rows}"


def _shared(chosen: str, rows: Mapping[str, Mapping[str, str]]) -> tuple[str, list[str]] | None:
    """The earlier class that has most rows of a class, and these fields; None if it has fewer than three."""
    same = {
        earlier: [field for field, row in rows[chosen].items() if others.get(field) == row]
        for earlier, others in rows.items()
        if earlier != chosen
    }
    nearest = max(same, key=lambda earlier: len(same[earlier]), default=None)
    return (nearest, same[nearest]) if nearest and len(same[nearest]) > 2 else None


def _filled(text: str, indent: str = "") -> str:
    """A paragraph or an item of a list, whose lines end at COLUMNS."""
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _first_line(group: type[ConfigGroup]) -> str:
    return (group.__doc__ or "").partition("\n\n")[0]


def _rows(name: str, group: type[ConfigGroup], fields: Iterable[str]) -> str:
    header = "| field | allowed | unit | default | meaning | classic key |\n|---|---|---|---|---|---|\n"
    return header + "".join(_row(name, group, field) for field in fields)


def _row(name: str, group: type[ConfigGroup], field: str) -> str:
    cells = (
        f"`{name}.{field}`",
        describe.allowed(group, field),
        describe.unit(group, field),
        _default(group, field),
        _meaning(group, field),
        classic.CLASSIC_KEY.get((name, field), ""),
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _meaning(group: type[ConfigGroup], field: str) -> str:
    """The docstring below a field, on one line."""
    return next(texts[field] for base in group.__mro__ if field in (texts := _docstrings(base)))


@cache
def _docstrings(group: type) -> dict[str, str]:
    """The docstrings below the fields that a class defines. pydantic could collect them, at each start of a command."""
    (definition,) = ast.parse(inspect.getsource(group)).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(below.value.value.split())
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _default(group: type[ConfigGroup], field: str) -> str:
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
