"""Describes the values that a field accepts, from its JSON schema, for error messages and docs/config.md."""

import json
from functools import cache
from typing import Any

from mesh_transformer.fields import INT32_MAX, ConfigGroup

SHOWN_CHARS = 80
TYPES = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a string",
    "array": 'a list of strings, such as ["lambada", "piqa"]',
    "numbers": "a list of whole numbers, 0 or more, such as [0, 2]",
    "prompts": 'one text, or a list of texts and lists of messages, such as ["Hello"]',
    "range": "two whole numbers, the first 1 or more and the second not less than the first, such as [10, 13]",
}
LIMITS = {
    "minimum": "{} or more",
    "exclusiveMinimum": "over {}",
    "exclusiveMaximum": "under {}",
    "maximum": "at most {}",
}


@cache
def schemas(group: type[ConfigGroup], name: str) -> list[dict[str, Any]]:
    """The JSON schemas of the types that a field accepts, without null."""
    field = group.model_json_schema()["properties"][name]
    return [field | alternative for alternative in _alternatives(field) if alternative["type"] != "null"]


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternatives of a schema, one of which a value must fit; alternatives inside them are taken apart."""
    inner = schema.get("anyOf") or schema.get("oneOf")
    return [alternative for nested in inner for alternative in _alternatives(nested)] if inner else [schema]


def allowed(group: type[ConfigGroup], name: str) -> str:
    """The values that a field accepts, such as `a whole number, 1 or more`."""
    alternatives = schemas(group, name)
    return str(alternatives[0]["words"]) if "words" in alternatives[0] else " or ".join(map(_words, alternatives))


def allowed_item(group: type[ConfigGroup], name: str) -> str:
    """The values that an item of the field's list or object accepts."""
    items = schemas(group, name)[0].get("items", {})
    return _words(items) if items.get("type") == "integer" else "a string that is not empty"


def _words(schema: dict[str, Any]) -> str:
    if values := _values(schema):
        return values[0] if len(values) == 1 else "one of " + ", ".join(values)
    # only the error for a larger number mentions INT32_MAX
    limits = [text.format(schema[key]) for key, text in LIMITS.items() if schema.get(key, INT32_MAX) != INT32_MAX]
    kind = schema["type"]
    if kind == "array":
        kind = _list_kind(schema)
    words = TYPES[kind] + (f", {' and '.join(limits)}" if limits else "")
    return f"{words} that is not empty" if "minLength" in schema else words


def _list_kind(schema: dict[str, Any]) -> str:
    items = schema.get("items", {})
    if "prefixItems" in schema:
        return "range"
    if "anyOf" in items:
        return "prompts"
    return "array" if items.get("type") == "string" else "numbers"


def choices(group: type[ConfigGroup], name: str) -> list[str]:
    """The strings that a field accepts, if it accepts only certain ones."""
    return [value for schema in schemas(group, name) for value in _values(schema)]


def _values(schema: dict[str, Any]) -> list[str]:
    return schema.get("enum") or ([schema["const"]] if "const" in schema else [])


def unit(group: type[ConfigGroup], name: str) -> str:
    """What the field counts, such as `tokens`, or an empty string."""
    return "".join(schema.get("unit", "") for schema in schemas(group, name))


def derived(group: type[ConfigGroup], name: str) -> str:
    """How the default follows from other fields, or an empty string."""
    return schemas(group, name)[0].get("derived", "")


def short(value: Any) -> str:
    """`value` as JSON-like text for an error message, cut at SHOWN_CHARS characters."""
    text = _repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _repr(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and abs(value) >= 10**SHOWN_CHARS:
        # str() of a very long int raises
        return "a whole number with too many digits"
    if isinstance(value, str):
        return repr(value[: SHOWN_CHARS + 1])
    return repr(value)
