"""Read a config file in either spelling, apply `--set` overrides, validate."""

import difflib
import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mesh_transformer import files
from mesh_transformer.config import classic, classic_meaning, names, strict_json
from mesh_transformer.config.describe import allowed, choices, schemas, short
from mesh_transformer.config.overrides import apply_override, is_ignored, is_set, without_ignored
from mesh_transformer.config.schema import VARIANTS, Config, class_at
from mesh_transformer.errors import UserError
from mesh_transformer.fields import Group

MAX_FILE_BYTES = 1 << 20

log = logging.getLogger(__name__)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read `path` (local or gs://), apply the overrides in order, and validate.

    Args:
        overrides: `NAME=VALUE`, or `-KEY`: a key of the file that is left out.

    Raises:
        UserError: the file, a key, a value or a combination of values is not usable.
    """
    text = _read(path)
    try:
        if not text.strip():
            raise UserError("the file is empty: a config is a JSON object, see the files under configs/")
        repeated: list[str] = []
        raw = strict_json.parse(text, repeated)
        config, notes = _resolve(raw, overrides, repeated)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    for note in notes:
        _tell_once(f"{path}: {note}")
    return config


def parse_config(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Config:
    """Validate a config given as a dictionary, grouped or classic; `overrides` as in `load_config`.

    Raises:
        UserError: a key, a value or a combination of values is not usable.
    """
    config, notes = _resolve(raw, overrides)
    for note in notes:
        log.warning("%s", note)
    return config


@cache
def _tell_once(line: str) -> None:
    # a command may read its file more than once
    log.warning("%s", line)


def _resolve(raw: Any, overrides: Sequence[str], repeated: Sequence[str] = ()) -> tuple[Config, list[str]]:
    """The config, and a sentence for each thing in a classic file that was not taken as it is written."""
    if not isinstance(raw, dict):
        raise UserError(f"a config must be a JSON object ({{...}}), not {short(raw)}")
    raw = names.moved(without_ignored(raw, overrides))
    changes = [override for override in overrides if not is_ignored(override)]
    names.check_file(raw)
    flat = not names.is_grouped(raw)
    if repeated and not flat:
        raise UserError(f"{repeated[0]}: keep one")
    grouped = classic.to_grouped(raw) if flat else _groups(raw)
    for change in changes:
        apply_override(grouped, change)
    notes = [f"{twice}: the last one counts" for twice in repeated]
    if flat:
        notes += classic_meaning.apply(grouped, partial(is_set, changes))
    for group, variants in VARIANTS.items():
        variants.check(group, grouped.get(group, {}))
    try:
        return Config.model_validate(grouped), notes
    except ValidationError as error:
        raise UserError(_explain_all(error.errors())) from error


def _groups(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    for group, values in raw.items():
        if not isinstance(values, (dict, type(None))):
            raise UserError(f"{group} = {short(values)}: expected an object of fields ({{...}})")
    return {group: dict(values) for group, values in raw.items() if values is not None}


def _read(path: str) -> str:
    try:
        with files.open_binary(path) as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder: name the config file in it") from error
    except UserError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
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
    group, inside = class_at([str(part) for part in place])
    required = [name for name, field in group.model_fields.items() if field.is_required()]
    return ", ".join(names.spelled(str(place[0]), name) for name in inside or required)


def _explain(detail: ErrorDetails) -> str:
    cause = detail.get("ctx", {}).get("error")
    place = [str(part) for part in detail["loc"]]
    group, inside = class_at(place) if place else (Config, [])
    if not inside:
        return str(cause or detail["msg"])
    field, *inner = inside
    if len(schemas(group, field)) > 1:
        inner = []  # pydantic names the type that did not fit
    where = ".".join([names.spelled(place[0], field), *(part for part in inner if part not in ("", "[key]"))])
    if isinstance(cause, UserError):
        return f"{where} = {short(detail['input'])}: {cause}"
    expected = "a string that is not empty" if inner else allowed(group, field)
    if detail["type"] == "less_than_equal":
        expected += f", and at most {detail['ctx']['le']}"
    if detail["type"] == "finite_number":
        expected += ", and finite"
    return f"{where} = {short(detail['input'])}: expected {expected}{_nearest_choice(group, field, detail)}"


def _nearest_choice(group: type[Group], field: str, detail: ErrorDetails) -> str:
    if not isinstance(detail["input"], str):
        return ""
    close = difflib.get_close_matches(detail["input"][:100], choices(group, field), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
