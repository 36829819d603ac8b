"""What the groups of a config are made of: number and text types that carry their unit, the frozen group, a size check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, model_validator

from mesh_transformer.errors import UserError

INT32_MAX = 2**31 - 1  # what a step counter and a random seed hold on the device


@dataclass(frozen=True)
class Unit:
    """What a number counts; shown in docs/config.md."""

    name: str


@dataclass(frozen=True)
class Derived:
    """How an absent value is found, for a field whose default depends on other fields."""

    rule: str


def whole(value: Any) -> Any:
    """2e3 in JSON is a float: accept it where it is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def size(value: Any) -> int | None:
    """A usable size, or None for what validation is going to refuse."""
    value = whole(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _text(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):  # a run named 2021
        return str(value)
    if isinstance(value, str) and not value.replace("\n", "").replace("\t", "").isprintable():
        raise UserError("it holds a character that cannot be printed: remove it")
    return value


def _blank_is_none(value: Any) -> Any:
    return None if value == "" else _text(value)


Count = Annotated[int, Strict(), Ge(1), Le(INT32_MAX), BeforeValidator(whole)]
CountOrZero = Annotated[int, Strict(), Ge(0), Le(INT32_MAX), BeforeValidator(whole)]
Dims = Annotated[Count, Unit("dims")]
Heads = Annotated[Count, Unit("heads")]
Layers = Annotated[Count, Unit("layers")]
Tokens = Annotated[Count, Unit("tokens")]
Rows = Annotated[Count, Unit("rows")]
Devices = Annotated[Count, Unit("devices")]
# steps are counted by Python, or compared as float32: a distance that no run reaches means "never"
Steps = Annotated[int, Strict(), Ge(1), BeforeValidator(whole), Unit("steps")]
Sequences = Annotated[Count, Unit("sequences")]
Mebibytes = Annotated[Count, Unit("MiB")]

Real = Annotated[float, Strict()]
Positive = Annotated[Real, Gt(0)]
NonNegative = Annotated[Real, Ge(0)]
Fraction = Annotated[Real, Ge(0), Lt(1)]

Switch = Annotated[bool, Strict()]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, MinLen(1), BeforeValidator(_text)]
OptionalText = Annotated[str | None, BeforeValidator(_blank_is_none)]


class Group(BaseModel):
    """A frozen group of fields that rejects names it does not know; null is the same as absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return cls.derive({name: value for name, value in values.items() if value is not None})

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in fields that depend on others; the values are not validated yet."""
        return values


def _divisors(value: int) -> Iterator[int]:
    for small in range(1, math.isqrt(value) + 1):
        if value % small == 0:
            yield from (small, value // small)


def check_divides(what: str, value: int, by_what: str, by: int, also: str = "") -> None:
    """Refuse a size that its mesh axes do not divide, naming sizes that would do.

    Raises:
        UserError: `by` does not divide `value`.
    """
    if value % by:
        below, above = value // by * by, (value // by + 1) * by
        divisor = max(d for d in _divisors(value) if d < by)
        sizes = f"{below} or {above}" if below else f"{above}"
        raise UserError(
            f"{what} {value} is not divisible by {by_what} {by}: set it to {sizes}, or {by_what} to {divisor}"
            + (f", or set {also}" if also else "")
        )
