"""Read a config file in either spelling, apply `--set` overrides, validate."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mesh_transformer import files
from mesh_transformer.config import classic
from mesh_transformer.config.schema import Config
from mesh_transformer.errors import UserError

GROUPS: dict[str, tuple[str, ...]] = {
    name: tuple(field.annotation.model_fields)
    for name, field in Config.model_fields.items()  # type: ignore[union-attr]
}


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (local or gs://), apply `group.key=value` overrides in order, and validate.

    Raises:
        UserError: the file, a key, a value or a combination of values is not usable.
    """
    with files.open_binary(path) as stream:
        text = stream.read(1 << 20)
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    try:
        return parse_config(raw, overrides)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse_config(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validate a config given as a dictionary, grouped or classic.

    Raises:
        UserError: a key, a value or a combination of values is not usable.
    """
    grouped = _grouped(raw)
    for override in overrides:
        _apply(grouped, override)
    try:
        return Config.model_validate(grouped)
    except ValidationError as error:
        raise UserError("; ".join(_explain(detail) for detail in error.errors())) from error


def _grouped(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    if raw.keys() & GROUPS.keys():
        _reject_unknown("", raw, GROUPS)
        for group, values in raw.items():
            if not isinstance(values, dict):
                raise UserError(f"group {group} must be a JSON object, not {values!r}")
            _reject_unknown(f"{group}.", values, GROUPS[group])
        return {group: dict(values) for group, values in raw.items()}
    _reject_unknown("", raw, classic.KEYS)
    return classic.to_grouped(raw)


def _reject_unknown(prefix: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
            raise UserError(f"unknown key {prefix}{key}: did you mean {prefix}{near[0]}?")


def _apply(grouped: dict[str, dict[str, Any]], override: str) -> None:
    name, separator, text = override.partition("=")
    if not separator:
        raise UserError(f"--set {override}: expected group.key=value")
    group, key, *rest = (*_full_name(name.strip()).split("."),)
    values = grouped.setdefault(group, {})
    for part in rest:  # an entry of a dictionary, such as data.val_set.pile
        inner = values.get(key)
        values[key] = dict(inner) if isinstance(inner, dict) else {}
        values, key = values[key], part
    try:
        values[key] = json.loads(text)
    except ValueError:
        values[key] = text


def _full_name(name: str) -> str:
    """`group.key` of a dotted name, of a classic key or of a field name that only one group has."""
    if "." not in name:
        if name in classic.RENAMED:
            return ".".join(classic.RENAMED[name])
        owners = [group for group, keys in GROUPS.items() if name in keys]
        if len(owners) != 1:
            _reject_unknown("", [name], [f"{group}.{key}" for group, keys in GROUPS.items() for key in keys])
        return f"{owners[0]}.{name}"
    group, key = name.split(".")[:2]
    _reject_unknown("", [group], GROUPS)
    _reject_unknown(f"{group}.", [key], GROUPS[group])
    return name


def _explain(detail: ErrorDetails) -> str:
    name = ".".join(str(part) for part in detail["loc"])
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, UserError):
        return str(cause)
    if detail["type"] == "missing":
        return f"{name} is missing: it has no default"
    return f"{name} = {detail['input']!r}: {detail['msg'][:1].lower()}{detail['msg'][1:]}"
