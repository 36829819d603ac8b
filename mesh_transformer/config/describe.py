"""What a field accepts, in words: for error messages and for docs/config.md."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

from mesh_transformer.fields import INT32_MAX, Derived, Group, Unit

SHOWN_CHARS = 80


@dataclass(frozen=True)
class Kind:
    """A field's type, taken apart."""

    base: Any  # int, float, bool, str, tuple, dict or a Literal
    optional: bool
    metadata: tuple[Any, ...] = field(default=())

    def find(self, kind: type) -> Any:
        """The outermost mark of one kind (Unit, Derived, Ge, ...), or None."""
        return next((mark for mark in reversed(self.metadata) if isinstance(mark, kind)), None)


@cache
def kind_of(group: type[Group], name: str) -> Kind:
    """Take apart the annotation of one field."""
    parts = list(_unwrap(get_type_hints(group, include_extras=True)[name]))
    bases = [base for base, _ in parts if base is not type(None)]
    return Kind(bases[0], len(bases) < len(parts), tuple(mark for _, marks in parts for mark in marks))


def _unwrap(annotation: Any, marks: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    if get_origin(annotation) is Annotated:
        inner, *outer = get_args(annotation)
        yield from _unwrap(inner, (*outer, *marks))
    elif type(None) in get_args(annotation):
        for part in get_args(annotation):
            yield from _unwrap(part, marks)
    else:
        yield annotation, marks


def allowed(group: type[Group], name: str) -> str:
    """The values that a field accepts, such as `a whole number, 1 or more`."""
    kind = kind_of(group, name)
    if get_origin(kind.base) is Literal:
        return "one of " + ", ".join(get_args(kind.base))
    if kind.base in (int, float):
        bounds = " and ".join(_bounds(kind))
        return ("a whole number" if kind.base is int else "a number") + (f", {bounds}" if bounds else "")
    if kind.base is bool:
        return "true or false"
    if get_origin(kind.base) is tuple:
        return 'a list of strings, such as ["lambada", "piqa"]'
    if get_origin(kind.base) is dict:
        return 'one file, or an object of name to file, such as {"pile": "pile.val.index"}'
    return "a string that is not empty" if kind.find(MinLen) else "a string"


def _bounds(kind: Kind) -> Iterator[str]:
    # an outer mark narrows an inner one
    if (ge := kind.find(Ge)) is not None:
        yield f"{ge.ge} or more"
    if (gt := kind.find(Gt)) is not None:
        yield f"over {gt.gt}"
    if (lt := kind.find(Lt)) is not None:
        yield f"under {lt.lt}"
    if (le := kind.find(Le)) is not None and le.le != INT32_MAX:  # that one only an error mentions
        yield f"at most {le.le}"


def unit(group: type[Group], name: str) -> str:
    """What the field counts, or an empty string."""
    mark = kind_of(group, name).find(Unit)
    return mark.name if mark else ""


def derived(group: type[Group], name: str) -> str:
    """How the field is found where it is absent, or an empty string."""
    mark = kind_of(group, name).find(Derived)
    return mark.rule if mark else ""


def short(value: Any) -> str:
    """`value` for an error message: as JSON-like text, cut where it is long."""
    text = _repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _repr(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int) and abs(value) >= 10**SHOWN_CHARS:
        return "a whole number with too many digits"  # str() of a very long int is itself an error
    if isinstance(value, str):
        return repr(value[: SHOWN_CHARS + 1])
    return repr(value)
