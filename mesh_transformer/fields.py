"""The base class of config groups, and the types of their fields with limits and units."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict, model_validator

from mesh_transformer.errors import UserError

_Mark = TypeVar("_Mark")
# largest step counter and random seed on the device
INT32_MAX = 2**31 - 1
_PROMPT = 'a text, or a list of messages such as [{"role": "user", "content": "Hello"}]'


class SchemaText:
    """Text that is added to the JSON schema of a field, for docs/config.md."""

    def __init__(self, text: str):
        self.text = text

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        return {**handler(core), type(self).__name__.lower(): self.text}


class Unit(SchemaText):
    """The unit of a number."""


class Words(SchemaText):
    """The values that a field accepts, in words, for a schema whose types are too wide."""


class Derived(SchemaText):
    """The rule for a default that depends on other fields, in words.

    Args:
        of: the field of which `rule` makes the default in a family's config. None: `derive` makes it.
    """

    def __init__(self, text: str, *, of: str | None = None, rule: Callable[[int], float] = int):
        super().__init__(text)
        self.of, self.rule = of, rule


def whole(value: Any) -> Any:
    """Convert a float such as 2e3 to an int if it is a whole number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def size(value: Any) -> int | None:
    """A valid size, or None if validation will refuse the value."""
    value = whole(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _range(value: Any) -> tuple[int, int]:
    first, last = map(size, value) if isinstance(value, list | tuple) and len(value) == 2 else (None, None)
    if first is None or last is None or first > last:
        raise ValueError("not a range")
    return first, last


def _text(value: Any) -> Any:
    # a run may be named 2021
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and not value.replace("\n", "").replace("\t", "").isprintable():
        raise UserError("it holds a character that cannot be printed: remove it")
    return value


def _blank_is_none(value: Any) -> Any:
    return None if value == "" else _text(value)


def _prompts(value: Any) -> Any:
    prompts = [value] if isinstance(value, str) and value else value
    if not isinstance(prompts, list | tuple):
        raise UserError(f"expected a list of prompts; each is {_PROMPT}")
    for number, prompt in enumerate(prompts, 1):
        is_text = isinstance(prompt, str) and prompt != ""
        if not is_text and not _is_chat(prompt):
            raise UserError(f"expected as prompt {number} {_PROMPT}")
    return tuple(prompts)


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    texts = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    return texts and {"role", "content"} <= value.keys()


Count = Annotated[int, Strict(), Ge(1), Le(INT32_MAX), BeforeValidator(whole)]
CountOrZero = Annotated[int, Strict(), Ge(0), Le(INT32_MAX), BeforeValidator(whole)]
Dims = Annotated[Count, Unit("dims")]
Heads = Annotated[Count, Unit("heads")]
# limited, because a decoder lists its layers and a file may give any number
MOST_LAYERS = 100_000
Layers = Annotated[Count, Le(MOST_LAYERS), Unit("layers")]
# numbers of layers, from 0
LayerNumbers = Annotated[tuple[CountOrZero, ...], Unit("layers")]
Tokens = Annotated[Count, Unit("tokens")]
Rows = Annotated[Count, Unit("rows")]
Devices = Annotated[Count, Unit("devices")]
# unlimited: Python counts steps, and an interval that no run reaches means "never"
Steps = Annotated[int, Strict(), Ge(1), BeforeValidator(whole), Unit("steps")]
# the first and the last step
StepRange = Annotated[tuple[int, int], BeforeValidator(_range), Unit("steps")]
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
Message = dict[str, str]
# a text, or the messages of a chat
Prompt = str | list[Message]
# a single text is a list of one prompt
Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]


STACKS = PIPELINED, WHOLE = "layers", "whole_layers"
"""The names of the layer dimension of stacked parameters: of the group of layers that is split over the pipeline
stages, and of a group that every stage computes."""


class Size(NamedTuple):
    """The size of a named dimension, and the field that sets it.

    `value` is rounded up to a multiple of `multiple`, which the field `multiple_field` sets, as for the vocabulary.
    """

    field: str
    value: int
    multiple_field: str = ""
    multiple: int = 1

    @property
    def whole(self) -> int:
        """The size, rounded up."""
        return -(-self.value // self.multiple) * self.multiple


class ConfigGroup(BaseModel):
    """A frozen group of fields that refuses unknown names. Null means absent."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return cls.derive({name: value for name, value in values.items() if value is not None})

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Fill in fields that depend on others. The values are not validated yet."""
        return values


def marks(group: type[ConfigGroup], kind: type[_Mark]) -> dict[str, _Mark]:
    """The fields that are annotated with a mark of type `kind`, with their marks."""
    annotations = ((name, mark) for name, field in group.model_fields.items() for mark in field.metadata)
    return {name: mark for name, mark in annotations if isinstance(mark, kind)}
