"""What is wrong with text that is not JSON, in words: the line, and the cause where it is one that people often make."""

from __future__ import annotations

import json
import re

SHOWN_CHARS = 40
MERGE_MARKER = re.compile(r"(<{7}|={7}|>{7}|\|{7})(?=\s|$)")
WORDS = {"True": "true", "False": "false", "None": "null"}


def explain(text: str, error: json.JSONDecodeError) -> str:
    """`line N: cause` for text that the json module refused with `error`."""
    before = text[: error.pos].rstrip()
    after = text[error.pos :].lstrip()
    cause = _cause(before, after, error.msg)
    # what is missing, or there too much, before a line's first character stands on the line before
    place = len(before) if cause in (_TRAILING, _NO_COMMA) else error.pos
    return f"line {text.count(chr(10), 0, place) + 1}: {cause}"


_TRAILING = "a comma before the closing bracket"
_NO_COMMA = "a comma is missing after the value"


def line_of(text: str, pattern: str) -> str:
    """`line N`, of the first match outside the strings."""
    outside = re.sub(r'"(?:\\.|[^"\\])*"', lambda string: " " * len(string.group()), text)
    match = re.search(pattern, outside)
    return f"line {text.count(chr(10), 0, match.start() if match else 0) + 1}"


def _cause(before: str, after: str, message: str) -> str:
    if MERGE_MARKER.match(after):
        return f"{after.splitlines()[0][:SHOWN_CHARS].rstrip()}: an unfinished git merge"
    if after.startswith(("//", "#", "/*")):
        return "JSON has no comments"
    # from Python 3.13 on the error stands at the comma itself
    if (before.endswith(",") and after[:1] in ("}", "]")) or re.match(r",\s*[}\]]", after):
        return _TRAILING
    if message.startswith(("Unterminated string", "Invalid control character")):
        return "a string without its closing quote"
    if message.startswith("Invalid \\escape"):
        return "a single backslash in a string: write two"
    if message.startswith("Extra data"):
        return "more text after the last closing bracket"
    if not after:
        return "the file ends before the last bracket is closed"
    if after[0] in "'\u2018\u2019\u201c\u201d":
        return f'{after[0]} is not a quote in JSON: write "'
    return _misplaced(after, message)


def _misplaced(after: str, message: str) -> str:
    word = re.match(r"[^\s,:{}\[\]]*", after)
    found = (word.group() if word else "")[:SHOWN_CHARS] or after[0]
    if message.startswith("Expecting ','"):
        return _NO_COMMA if found.startswith('"') else f"expected a comma or a closing bracket, found {found}"
    if message.startswith("Expecting ':'"):
        return f'expected a colon, as in "key": value, found {found}'
    if message.startswith("Expecting property name"):
        return f"expected a key in double quotes, found {found}"
    if found in WORDS:
        return f"{found} is not JSON: write {WORDS[found]}"
    if found.endswith('"'):
        return f"{found}: a string without its opening quote"
    return f"expected a number, true, false, null, a string in double quotes, {{ or [, found {found}"
