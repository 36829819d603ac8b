"""Read a config file in either spelling, apply the overrides of the command line and validate the result.

A line whose first characters are // is a comment. The rest of a file is JSON.
An override is `NAME=VALUE` (--set), or `-KEY` to ignore a key of the file (--ignore-keys).
"""

import logging
import os
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mesh_transformer import files
from mesh_transformer.config import classic, names, shipped, strict_json
from mesh_transformer.config.describe import allowed, allowed_item, choices, schemas, short
from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.config.schema import GROUPS, VARIANTS, CheckpointConfig, Config, class_at
from mesh_transformer.errors import UserError, did_you_mean
from mesh_transformer.fields import ConfigGroup

MAX_FILE_BYTES = 1 << 20
# Two fields for one size: an override of one removes the other from the file's values.
ALTERNATIVES = {"batch_size": "per_replica_batch", "per_replica_batch": "batch_size"}
USAGE = "write --set NAME=VALUE, such as --set optimizer.total_steps=20"

# A string of JSON has no line end, so that such a line is not inside one.
_COMMENT = re.compile(r"^[ \t]*//.*$", re.MULTILINE)
# pydantic's place of the sources of a mixture
_SOURCES = ("data", "train_set", "sources")
_MODEL = "model"

log = logging.getLogger(__name__)

FindModel = Callable[[CheckpointConfig], dict[str, Any] | None]
"""Returns the values of the group `model` for a file without this group; None if no checkpoint tells them."""


def load_config(path: str, overrides: Sequence[str] = (), find_model: FindModel | None = None) -> Config:
    """Read `path` (local or gs://), apply the overrides in order, and validate.

    Args:
        path: a file, or the name of a config that comes with the project.
        overrides: `NAME=VALUE`, or `-KEY` to ignore a key of the file.
        find_model: called if a file in the grouped spelling has no group `model`; the overrides apply to its result.

    Raises:
        UserError: the file, a key, a value or a combination of values is not usable.
    """
    coming = shipped.find(path)
    text = _without_comments(_read(coming or path))
    try:
        if not text.strip():
            raise UserError("the file is empty: a config is a JSON object, see the files under configs/")
        repeated: list[str] = []
        raw = strict_json.parse(text, repeated)
        if coming is not None:
            raw = shipped.with_data(raw)
        config, notes = _resolve(raw, overrides, repeated, find_model)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    for note in notes:
        _warn_once(f"{path}: {note}")
    return config


def parse_config(raw: dict[str, Any], overrides: Sequence[str] = (), find_model: FindModel | None = None) -> Config:
    """Validate a config given as a dictionary, grouped or classic; the other arguments as in `load_config`.

    Raises:
        UserError: a key, a value or a combination of values is not usable.
    """
    config, notes = _resolve(raw, overrides, find_model=find_model)
    for note in notes:
        log.warning("%s", note)
    return config


def _apply_override(grouped: dict[str, dict[str, Any]], override: str) -> None:
    """Write one `NAME=VALUE` into a config in the grouped spelling.

    NAME is `group.field`, `data.val_set.ENTRY`, `data.train_set.SOURCE.FIELD`, a classic key or a field name that only
    one group has.
    VALUE is JSON, where null means absent, or else a string. A text field takes VALUE as it is written.

    Raises:
        UserError: the override is malformed or names no field.
    """
    name, separator, text = _parts(override)
    try:
        if not separator or not name:
            raise UserError(USAGE)
        _write(grouped, name, text)
    except UserError as error:
        raise UserError(f"--set {short(override)[1:-1]}: {error}") from error


def is_set(overrides: Sequence[str], group: str, field: str) -> bool:
    """Whether an override sets this field, in either spelling. The overrides must be valid for `_apply_override`."""
    names_given = (_parts(override)[0] for override in overrides if not is_ignored(override))
    return any(names.resolve(name)[:2] == (group, field) for name in names_given if name not in classic.SWITCHES)


def is_ignored(override: str) -> bool:
    """Whether an override ignores a key, rather than sets a value."""
    return override.startswith("-")


def _without_ignored(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A file without the ignored keys: `KEY` at its top level, or `GROUP.KEY`. An ignored key may be absent."""
    ignored = {override.removeprefix("-") for override in overrides if is_ignored(override)}
    left = {key: value for key, value in raw.items() if key not in ignored}
    for group, values in left.items():
        if group in GROUPS and isinstance(values, dict):
            left[group] = {key: value for key, value in values.items() if f"{group}.{key}" not in ignored}
    return left


@cache
def _warn_once(line: str) -> None:
    # a command may read its file more than once
    log.warning("%s", line)


def _resolve(
    raw: Any, overrides: Sequence[str], repeated: Sequence[str] = (), find_model: FindModel | None = None
) -> tuple[Config, list[str]]:
    """The config, and a sentence for each value of a classic file that is not used as written."""
    if not isinstance(raw, dict):
        raise UserError(f"a config must be a JSON object ({{...}}), not {short(raw)}")
    # a key of another program may have the name of the group
    ignores_model = f"-{_MODEL}" in overrides and (names.is_grouped(raw) or _MODEL not in raw)
    raw = names.moved(_without_ignored(raw, overrides))
    changes = [override for override in overrides if not is_ignored(override)]
    names.check_file(raw)
    flat = not names.is_grouped(raw)
    if repeated and not flat:
        raise UserError(f"{repeated[0]}: keep one")
    grouped = classic.to_grouped(raw) if flat else _groups(raw)
    lacks_model = ignores_model if flat else raw.get(_MODEL) is None
    if lacks_model:
        grouped.pop(_MODEL, None)
    for change in changes:
        _apply_override(grouped, change)
    notes = [f"{twice}: the last value is used" for twice in repeated]
    if flat:
        notes += classic.interpret(grouped, partial(is_set, changes), has_model=not lacks_model)
    if lacks_model and find_model is not None:
        _add_model(grouped, find_model)
    for group, variants in VARIANTS.items():
        variants.check(group, grouped.get(group, {}))
    try:
        return Config.model_validate(grouped), notes
    except ValidationError as error:
        raise UserError(_explain_all(error.errors())) from error


def _without_comments(text: str) -> str:
    """The JSON of a file. The lines keep their numbers, for messages."""
    return _COMMENT.sub("", text)


def _add_model(grouped: dict[str, dict[str, Any]], find_model: FindModel) -> None:
    try:
        settings = CheckpointConfig.model_validate(grouped.get("checkpoint", {}))
    except ValidationError:
        # the validation of the whole config reports it
        return
    try:
        recorded = find_model(settings) or {}
    except UserError as error:
        raise UserError(f"the group model is not given, and {error}") from error
    grouped["model"] = {**recorded, **grouped.get("model", {})}


def _groups(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for group, values in raw.items():
        if not isinstance(values, (dict, type(None))):
            raise UserError(f"{group} = {short(values)}: expected an object of fields ({{...}})")
    return {group: dict(values) for group, values in raw.items() if values is not None}


def _parts(override: str) -> tuple[str, str, str]:
    """Name, "=" and value."""
    name, separator, text = override.partition("=")
    return name.strip(), separator, text.strip()


def _write(grouped: dict[str, dict[str, Any]], name: str, text: str) -> None:
    if name in classic.SWITCHES:
        classic.place(grouped, name, _value(text))
        return
    group, field, entry = names.resolve(name, grouped)
    values = grouped.setdefault(group, {})
    if entry:
        write = _write_source if field == "train_set" else _write_val_set
        values[field] = write(values.get(field), entry, text)
        return
    types = {schema["type"] for schema in schemas(GROUPS[group], field)}
    if types == {"string"}:
        values[field] = _text(text)
    elif "object" in types:
        values[field] = value if isinstance(value := _value(text), (dict, list)) else _text(text)
    else:
        values[field] = _value(text)
        if group == "data" and field in ALTERNATIVES and values[field] is not None:
            values.pop(ALTERNATIVES[field], None)


def _write_val_set(given: Any, entry: str, text: str) -> dict[str, Any]:
    """The validation sets with the set `entry` added or replaced."""
    before = given if isinstance(given, dict) else {"val": given} if given else {}
    return {**before, entry: _text(text)}


def _write_source(given: Any, entry: str, text: str) -> dict[str, Any]:
    """The sources of a mixture with a field changed (`pile.weight`), or with a source added, replaced or removed."""
    if given and not isinstance(given, dict):
        raise UserError(f"data.train_set is one file, {short(given)}: give all sources as an object")
    before = given or {}
    name, _, field = entry.rpartition(".")
    if not name or (field not in TrainSource.model_fields and name not in before):
        return {**before, entry: _value(text)}
    source = before.get(name)
    fields = source if isinstance(source, dict) else {}
    return {**before, name: {**fields, field: _text(text) if field == "set" else _value(text)}}


def _value(text: str) -> Any:
    try:
        return strict_json.parse(text)
    except UserError:
        return text


def _text(text: str) -> str | None:
    """The text itself: 1e5, 007 and true stay as written; null and a quoted string are JSON."""
    value = _value(text)
    return value if value is None or isinstance(value, str) else text


def _read(path: str) -> str:
    try:
        with files.open_binary(path) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name the config file in it") from error
    except UserError as error:
        if os.path.exists(path) or os.sep in path or path.endswith(".json"):
            raise
        known = shipped.names()
        raise UserError(f"{error}{did_you_mean(path, known)}; the configs by name are {', '.join(known)}") from error
    # ValueError: a null character in the path
    except (OSError, ValueError) as error:
        if files.is_remote(path):
            raise
        raise UserError(f"{short(path)} cannot be read: {error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{path} is over {MAX_FILE_BYTES} bytes: a config is a small JSON file")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): save it as UTF-8 JSON") from error


def _explain_all(details: list[ErrorDetails]) -> str:
    missing = [_missing(detail["loc"]) for detail in details if detail["type"] == "missing"]
    faults = [_explain(detail) for detail in details if detail["type"] != "missing"]
    if missing:
        faults.append(f"required and not given: {', '.join(missing)}")
    return "; ".join(dict.fromkeys(faults))


def _missing(place: tuple[int | str, ...]) -> str:
    if place[: len(_SOURCES)] == _SOURCES:
        return ".".join(["data.train_set", *map(str, place[len(_SOURCES) :])])
    group, inside = class_at([str(part) for part in place])
    required = [name for name, field in group.model_fields.items() if field.is_required()]
    return ", ".join(names.spelled(str(place[0]), name) for name in inside or required)


def _explain(detail: ErrorDetails) -> str:
    place = [str(part) for part in detail["loc"]]
    if tuple(place[: len(_SOURCES)]) == _SOURCES and len(place) > len(_SOURCES):
        return _explain_source(detail, *place[len(_SOURCES) :])
    group, inside = class_at(place) if place else (Config, [])
    if not inside:
        return str(_cause(detail) or detail["msg"])
    field, *inner = inside
    if len(schemas(group, field)) > 1:
        # here pydantic names the type that did not fit
        inner = []
    where = ".".join([names.spelled(place[0], field), *(part for part in inner if part not in ("", "[key]"))])
    return _fault(detail, where, group, field, allowed_item(group, field) if inner else allowed(group, field))


def _explain_source(detail: ErrorDetails, name: str, *inside: str) -> str:
    """The fault of a source of a mixture, or of one of its fields."""
    where, fields = ".".join(["data.train_set", name, *inside[:1]]), TrainSource.model_fields
    if not inside or inside == ("[key]",):
        return f"data.train_set.{name} = {short(detail['input'])}: expected an object of {', '.join(fields)}"
    if inside[0] not in fields:
        return f"unknown key {where}: known are {', '.join(fields)}{did_you_mean(inside[0], fields)}"
    return _fault(detail, where, TrainSource, inside[0], allowed(TrainSource, inside[0]))


def _cause(detail: ErrorDetails) -> Any:
    return detail.get("ctx", {}).get("error")


def _fault(detail: ErrorDetails, where: str, group: type[ConfigGroup], field: str, expected: str) -> str:
    """The value that was given, and what is expected."""
    if isinstance(cause := _cause(detail), UserError):
        return f"{where} = {short(detail['input'])}: {cause}"
    if detail["type"] == "less_than_equal":
        expected += f", and at most {detail['ctx']['le']}"
    if detail["type"] == "finite_number":
        expected += ", and finite"
    if isinstance(detail["input"], str):
        expected += did_you_mean(detail["input"], choices(group, field))
    return f"{where} = {short(detail['input'])}: expected {expected}"
