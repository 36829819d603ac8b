"""JSON as the standard has it: no NaN, no duplicate keys, and every fault a UserError."""

import json
import sys
from typing import Any, NoReturn

from mesh_transformer import files
from mesh_transformer.config import json_faults
from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError

MAX_BYTES = 16 << 20  # of a file beside a checkpoint's tensors


def parse(text: str, repeated: list[str] | None = None) -> Any:
    """Parse JSON text.

    Args:
        repeated: filled with a sentence for each key that an object has twice with two values, of which the last one
            is taken; absent: such a key is refused.

    Raises:
        UserError: the text is not standard JSON or an object has a key twice.
    """

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                if values[key] == value and repeated is not None:
                    continue
                twice = f"the key {short(key)} is there twice ({short(values[key])} and {short(value)})"
                if repeated is None:
                    raise UserError(f"{twice}: keep one")
                repeated.append(twice)
            values[key] = value
        return values

    def refuse_constant(name: str) -> NoReturn:
        line = json_faults.line_of(text, name)
        raise UserError(f"{line}: {name} is not a number in JSON: write a finite number")

    try:
        return json.loads(text, object_pairs_hook=collect, parse_constant=refuse_constant)
    except UserError:
        raise
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {json_faults.explain(text, error)}") from error
    except ValueError as error:
        # the one other cause: Python limits the digits of a whole number
        digits = sys.get_int_max_str_digits()
        line = json_faults.line_of(text, rf"\d{{{digits + 1}}}")
        raise UserError(f"{line}: a number of more than {digits:,} digits") from error
    except RecursionError as error:
        raise UserError("not usable JSON: brackets are nested too deep") from error


def read_object(path: str) -> dict[str, Any]:
    """A JSON object of at most MAX_BYTES.

    Raises:
        UserError: there is no such file, it is too large, or no JSON object.
    """
    size = files.size(path)
    if size > MAX_BYTES:
        raise UserError(f"{path} is over {MAX_BYTES} bytes")
    return parse_object(files.read_range(path, 0, size), path)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `raw`, which messages call `what`.

    Raises:
        UserError: it is none.
    """
    try:
        value = parse(raw.decode())
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{what} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{what} is not a JSON object")
    return value
