"""JSON as the standard has it: no NaN, no duplicate keys, and every fault a UserError."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError


def parse(text: str) -> Any:
    """Parse JSON text.

    Raises:
        UserError: the text is not standard JSON or an object has a key twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"not JSON: {error}") from error
    except RecursionError as error:
        raise UserError("not usable JSON: brackets are nested too deep") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise UserError(
                f"the key {short(key)} is there twice ({short(values[key])} and {short(value)}): keep one"
            )
        values[key] = value
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise UserError(f"{name} is not a number that JSON knows: write a finite number")
