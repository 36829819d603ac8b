"""Changes on top of a config file: `NAME=VALUE` (--set), and `-KEY` for a key that is left out (--ignore-keys)."""

from collections.abc import Sequence
from typing import Any

from mesh_transformer.config import classic, names, strict_json
from mesh_transformer.config.describe import schemas, short
from mesh_transformer.config.schema import GROUPS
from mesh_transformer.errors import UserError

# Two ways to give one size: setting one on the command line takes the place of the other in the file.
INSTEAD = {"batch_size": "per_replica_batch", "per_replica_batch": "batch_size"}
USAGE = "write --set NAME=VALUE, such as --set optimizer.total_steps=20"


def apply_override(grouped: dict[str, dict[str, Any]], override: str) -> None:
    """Write one `NAME=VALUE` into a config in the grouped spelling.

    NAME is `group.field`, `data.val_set.ENTRY`, a classic key or a field name that only one group has.
    VALUE is JSON (null: as if absent) and otherwise a string; for a field of text it is the text itself.

    Raises:
        UserError: the override is malformed or names nothing.
    """
    name, separator, text = _parts(override)
    try:
        if not separator or not name:
            raise UserError(USAGE)
        _write(grouped, name, text)
    except UserError as error:
        raise UserError(f"--set {short(override)[1:-1]}: {error}") from error


def is_set(overrides: Sequence[str], group: str, field: str) -> bool:
    """Whether one of the overrides is of this field, in whatever spelling. All must be such as `apply_override` takes."""
    names_given = (_parts(override)[0] for override in overrides if not is_ignored(override))
    return any(
        names.resolve(name)[:2] == (group, field) for name in names_given if name not in classic.SWITCHES
    )


def is_ignored(override: str) -> bool:
    """Whether it is the name of a key that is left out, not a value."""
    return override.startswith("-")


def without_ignored(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A file without the keys that are left out: `KEY` at its top, or `GROUP.KEY`. One that it does not have is no error."""
    ignored = {override.removeprefix("-") for override in overrides if is_ignored(override)}
    left = {key: value for key, value in raw.items() if key not in ignored}
    for group, values in left.items():
        if group in GROUPS and isinstance(values, dict):
            left[group] = {key: value for key, value in values.items() if f"{group}.{key}" not in ignored}
    return left


def _parts(override: str) -> tuple[str, str, str]:
    """Name, "=" and value."""
    name, separator, text = override.partition("=")
    return name.strip(), separator, text.strip()


def _write(grouped: dict[str, dict[str, Any]], name: str, text: str) -> None:
    if name in classic.SWITCHES:
        classic.place(grouped, name, _value(text))
        return
    group, field, entry = names.resolve(name)
    values = grouped.setdefault(group, {})
    if entry:
        given = values.get(field)
        before = given if isinstance(given, dict) else {"val": given} if given else {}
        values[field] = {**before, entry: _text(text)}
        return
    types = {schema["type"] for schema in schemas(GROUPS[group], field)}
    if types == {"string"}:
        values[field] = _text(text)
    elif "object" in types:
        values[field] = value if isinstance(value := _value(text), (dict, list)) else _text(text)
    else:
        values[field] = _value(text)
        if group == "data" and field in INSTEAD and values[field] is not None:
            values.pop(INSTEAD[field], None)


def _value(text: str) -> Any:
    try:
        return strict_json.parse(text)
    except UserError:
        return text


def _text(text: str) -> str | None:
    """The text itself: 1e5, 007 and true stay as written; null and a quoted string are JSON."""
    value = _value(text)
    return value if value is None or isinstance(value, str) else text
