"""Small JSON files beside a checkpoint's tensors."""

from __future__ import annotations

from typing import Any

from mesh_transformer import files
from mesh_transformer.config import strict_json
from mesh_transformer.errors import UserError

MAX_JSON_BYTES = 16 << 20  # of config.json and of an index


def read_json(path: str) -> dict[str, Any]:
    """A JSON object of at most MAX_JSON_BYTES.

    Raises:
        UserError: there is no such file, it is too large, or no JSON object.
    """
    size = files.size(path)
    if size > MAX_JSON_BYTES:
        raise UserError(f"{path} is over {MAX_JSON_BYTES} bytes")
    return parse_object(files.read_range(path, 0, size), path)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `raw`, which messages call `what`.

    Raises:
        UserError: it is none.
    """
    try:
        value = strict_json.parse(raw.decode())
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{what} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{what} is not a JSON object")
    return value
