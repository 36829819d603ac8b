"""Standard JSON: no NaN and no duplicate keys. Every fault is a UserError."""

import json
import re
import sys
from typing import Any, NoReturn

from mesh_transformer import files
from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError

# limit for a JSON file of a checkpoint
MAX_BYTES = 16 << 20
SHOWN_WORD = 40
TRAILING = "a comma before the closing bracket"
NO_COMMA = "a comma is missing after the value"
# the end of a word
END = r"(?=[\s,:{}\[\]]|$)"
# start of the json module's message, pattern of the text at the fault, cause; the first row that matches is used
CAUSES = [
    ("", r"(<{7}|={7}|>{7}|\|{7})(\s|$)", "{line}: an unfinished git merge"),
    ("", r"//|#|/\*", "JSON has no comments, and a config only lines that begin with //"),
    ("Unterminated string", "", "a string without its closing quote"),
    ("Invalid control character", "", "a string without its closing quote"),
    ("Invalid \\escape", "", "a single backslash in a string: write two"),
    ("Extra data", "", "more text after the last closing bracket"),
    ("", "$", "the file ends before the last bracket is closed"),
    ("", "['\u2018\u2019\u201c\u201d]", '{word[0]} is not a quote in JSON: write "'),
    ("Expecting ','", '"', NO_COMMA),
    ("Expecting ','", "", "expected a comma or a closing bracket, found {word}"),
    ("Expecting ':'", "", 'expected a colon, as in "key": value, found {word}'),
    ("Expecting property name", "", "expected a key in double quotes, found {word}"),
    ("", "True" + END, "True is not JSON: write true"),
    ("", "False" + END, "False is not JSON: write false"),
    ("", "None" + END, "None is not JSON: write null"),
    ("", r'[^\s,:{}\[\]]*"' + END, "{word}: a string without its opening quote"),
    ("", "", "expected a number, true, false, null, a string in double quotes, {{ or [, found {word}"),
]


def parse(text: str, repeated: list[str] | None = None) -> Any:
    """Parse JSON text.

    Args:
        repeated: a list that gets a sentence for each key that an object has twice with different values; the last
            value is used. None: such a key is refused.

    Raises:
        UserError: the text is not standard JSON or an object has a key twice.
    """

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:
                if values[key] == value and repeated is not None:
                    continue
                twice = f"the key {short(key)} occurs twice ({short(values[key])} and {short(value)})"
                if repeated is None:
                    raise UserError(f"{twice}: keep one")
                repeated.append(twice)
            values[key] = value
        return values

    def refuse_constant(name: str) -> NoReturn:
        line = _line_of(text, name)
        raise UserError(f"{line}: {name} is not a number in JSON: write a finite number")

    try:
        return json.loads(text, object_pairs_hook=collect, parse_constant=refuse_constant)
    except UserError:
        raise
    except json.JSONDecodeError as error:
        raise UserError(f"not JSON: {_explain(text, error)}") from error
    except ValueError as error:
        # the only other cause: Python limits the digits of a whole number
        digits = sys.get_int_max_str_digits()
        line = _line_of(text, rf"\d{{{digits + 1}}}")
        raise UserError(f"{line}: a number of more than {digits:,} digits") from error
    except RecursionError as error:
        raise UserError("not usable JSON: brackets are nested too deep") from error


def read_object(path: str) -> dict[str, Any]:
    """Read a JSON object of at most MAX_BYTES from a file, local or gs://.

    Raises:
        UserError: the file does not exist, is too large or is not a JSON object.
    """
    size = files.size(path)
    if size > MAX_BYTES:
        raise UserError(f"{path} is over {MAX_BYTES} bytes")
    return parse_object(files.read_range(path, 0, size), path)


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """Parse the JSON object in `raw`, which messages call `what`.

    Raises:
        UserError: `raw` is not a JSON object.
    """
    try:
        value = parse(raw.decode())
    except (UserError, UnicodeDecodeError) as error:
        raise UserError(f"{what} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{what} is not a JSON object")
    return value


def _explain(text: str, error: json.JSONDecodeError) -> str:
    """`line N: cause` for text that the json module refused with `error`."""
    before, after = text[: error.pos].rstrip(), text[error.pos :].lstrip()
    # from Python 3.13 on, the error is at the comma itself
    if re.match(r".?,\s*[}\]]", before[-1:] + after, re.DOTALL):
        cause = TRAILING
    else:
        cause = next(cause for said, at, cause in CAUSES if error.msg.startswith(said) and re.match(at, after))
    word = re.split(r"[\s,:{}\[\]]", after, maxsplit=1)[0][:SHOWN_WORD] or after[:1]
    # an error at the first character of a line may be due to the end of the line before
    place = len(before) if cause in (TRAILING, NO_COMMA) else error.pos
    line = "".join(after.splitlines()[:1])[:SHOWN_WORD].rstrip()
    return f"line {text.count(chr(10), 0, place) + 1}: {cause.format(word=word, line=line)}"


def _line_of(text: str, pattern: str) -> str:
    """`line N` of the first match outside strings."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', lambda string: " " * len(string.group()), text)
    match = re.search(pattern, outside)
    return f"line {text.count(chr(10), 0, match.start() if match else 0) + 1}"
