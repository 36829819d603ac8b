"""The keys of config.json: how they are read, and the rows by which a family states them."""

import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from mesh_transformer.errors import UserError
from mesh_transformer.fields import INT32_MAX, ConfigGroup, Derived, marks

# keys of config.json, from transformers or from tools around it, that do not affect the model
_HARMLESS = re.compile(
    r"_.* | .*_token_id | .*drop(out)?(_prob)? | summary_.* | .*_version | architectures | (torch_)?dtype | use_cache"
    r"| initializer_range | id2label | label2id | problem_type | task_specific_params | finetuning_task"
    r"| tokenizer(_class)? | prefix | output_.* | return_dict(_in_generate)? | torchscript | is_decoder"
    r"| chunk_size_feed_forward | gradient_checkpointing | custom_pipelines | max_(new_tokens|length) | min_length"
    r"| do_sample | temperature | attn_implementation | unsloth_.*"
    r"| (top|typical)_[kp] | num_beams | num_beam_groups | num_return_sequences | .*_penalty | .*no_repeat_ngram_size"
    r"| rotary | scale_attn_weights | n_ctx | jax | compat | badwordsids | newlinemode | antemplate | formatoptns"
    r"| welcome",
    re.VERBOSE,
)

JsonObject = dict[str, Any]
"""The fields of a config, or the keys of config.json, as a file gives them. Their values are not checked yet."""


class ConfigJson:
    """The keys of a config.json. A family takes the keys that it knows; `refuse_rest` checks the remaining keys."""

    def __init__(self, values: JsonObject) -> None:
        self._left = dict(values)

    def take(self, *names: str, default: object) -> Any:
        """The value of the key that has any of these names.

        Raises:
            UserError: two of the names are given, with different values.
        """
        taken = {name: self._left.pop(name) for name in names if name in self._left}
        given = {name: value for name, value in taken.items() if value is not None}
        value = next(iter(given.values()), None if taken else default)
        if any(other != value for other in given.values()):
            said = " and ".join(f"{name} is {value!r:.60}" for name, value in given.items())
            raise UserError(f"{said}: these keys mean the same, keep one")
        return value

    def size(
        self,
        *names: str,
        default: int | None,
        null: bool = False,
        least: int = 1,
        most: int = INT32_MAX,
        why: str = "",
    ) -> Any:
        """A whole number from `least` to `most`; None, if the value is null and `null` allows it or the default is
        None.

        Raises:
            UserError: the value has another type or is out of range.
        """
        value = self.take(*names, default=default)
        if value is None and (null or default is None):
            return None
        if type(value) is not int or not least <= value <= most:
            limits = f"of {least} or more" if most == INT32_MAX else f"from {least} to {most}"
            raise UserError(f"{names[0]} is {value!r:.60}: expected a whole number {limits}{why}")
        return value

    def number(
        self, *names: str, default: float | None, most: float = 1e30, null: bool = False, zero: bool = False
    ) -> Any:
        """A number above 0, or 0 if `zero` allows it, and at most `most`; None, if the value is null and `null` allows
        it or the default is None.

        Raises:
            UserError: the value has another type or is out of range.
        """
        value = self.take(*names, default=default)
        if value is None and (null or default is None):
            return None
        if type(value) not in (int, float) or not 0 <= value <= most or (value == 0 and not zero):
            limits = f"from 0 to {most:g}" if zero else f"above 0 and at most {most:g}"
            raise UserError(f"{names[0]} is {value!r:.60}: expected a number {limits}")
        return float(value)

    def flag(self, *names: str, default: bool) -> bool:
        """True or false.

        Raises:
            UserError: the value is neither true nor false.
        """
        value = self.take(*names, default=default)
        if type(value) is not bool:
            raise UserError(f"{names[0]} is {value!r:.60}: expected true or false")
        return value

    def refuse_rest(self) -> None:
        """Refuse a key that the family did not take, unless it is off (null, false, 0, empty) or cannot affect the
        model.

        Raises:
            UserError: names the key.
        """
        if self._left.get("quantization_config"):
            raise UserError("the weights are quantized (quantization_config): save them in float first")
        for name, value in self._left.items():
            # a family without windows has only full attention
            full = name == "layer_types" and isinstance(value, list) and all(each == "full_attention" for each in value)
            if value and not full and not _HARMLESS.fullmatch(name):
                raise UserError(
                    f"{name!r:.60} is {value!r:.60}: this key is unknown and may change what the model "
                    "computes; if it does not, remove it from config.json"
                )


class Hf:
    """The row of a field that config.json has as it is: an annotation of the field. The type of the field says which
    values are allowed."""

    def __init__(
        self,
        *names: str,
        null: bool = False,
        most: int = INT32_MAX,
        why: str = "",
        words: Mapping[Any, str] | None = None,
    ) -> None:
        """State a row.

        Args:
            names: the key, which is written, then its other names, which are read too.
            null: the key may be null, and the field is derived then. Null is also allowed if the field may be absent,
                or if there is no default.
            most: the largest whole number.
            why: the end of the message for a number that is not allowed.
            words: the values of the field, and their names in config.json.
        """
        self.names, self.null, self.most, self.why, self.words = names, null, most, why, words or {}

    def read(self, keys: ConfigJson, field: FieldInfo, defaults: JsonObject) -> object:
        """The value of the field.

        Raises:
            UserError: the value is not allowed.
        """
        kinds = _kinds(field.annotation)
        has_default = not field.is_required() and not any(isinstance(mark, Derived) for mark in field.metadata)
        default: Any = defaults.get(self.names[0], self.write(field.default) if has_default else None)
        null = self.null or NoneType in kinds
        if self.words:
            return self._word(keys.take(*self.names, default=default))
        if bool in kinds:
            return keys.flag(*self.names, default=default)
        if float in kinds:
            return keys.number(*self.names, default=default, null=null)
        return keys.size(*self.names, default=default, null=null, most=self.most, why=self.why)

    def write(self, value: object) -> Any:
        """What config.json has for a value of the field."""
        return self.words[value] if self.words else value

    def _word(self, value: object) -> object:
        known = {theirs: ours for ours, theirs in self.words.items()}
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{self.names[0]} is {value!r:.60}: only {', '.join(known)} are supported")
        return known[value]


class Only:
    """The supported values of a key that no field holds. The first is the default of transformers."""

    def __init__(self, *allowed: object, written: bool = True, what: str = "") -> None:
        """State the values.

        Args:
            written: the first is written.
            what: what the values mean, for the message.
        """
        self.allowed, self.is_written, self._what = allowed, written, what

    def check(self, keys: ConfigJson, name: str) -> None:
        """Take the key.

        Raises:
            UserError: it has another value.
        """
        first = self.allowed[0]
        if isinstance(first, bool):
            if keys.flag(name, default=first) is not first:
                raise UserError(f"{name} is {str(not first).lower()}: only {str(first).lower()} is supported")
        elif (value := keys.take(name, default=first)) not in self.allowed:
            names = ", ".join(map(str, self.allowed))
            only = f"{self._what} is supported ({names})" if self._what else f"{names} is supported"
            raise UserError(f"{name} is {value!r:.60}: only {only}")


class HfKeys(ConfigGroup):
    """The tables of a family's keys. A class that changes a table of the class that it extends repeats its rows."""

    HF_DEFAULTS: ClassVar[JsonObject] = {}
    """What transformers takes for keys that a config.json leaves out, if it is not the default of the field."""
    HF_ROWS: ClassVar[Mapping[str, Hf | None]] = {}
    """The rows of inherited fields whose key differs in this family; None: config.json has no such key."""
    HF_FIXED: ClassVar[Mapping[str, Only]] = {}
    """Keys that no field holds, and their supported values."""
    HF_IGNORED: ClassVar[tuple[str, ...]] = ()
    """Keys that do not affect the model, with any value."""
    HF_WRITTEN: ClassVar[JsonObject] = {}
    """Further keys that are written, with one value for all models."""

    @classmethod
    def from_hf(cls, keys: ConfigJson) -> Self:
        """The config that a config.json describes.

        Raises:
            UserError: this program does not support the model; names the key.
        """
        return cls(**cls.fields_from_hf(keys))

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """The fields that a config.json gives. A family adds the fields that it computes.

        Raises:
            UserError: as in `from_hf`.
        """
        fields = {name: row.read(keys, cls.model_fields[name], cls.HF_DEFAULTS) for name, row in cls.hf_rows().items()}
        for name, only in cls.HF_FIXED.items():
            only.check(keys, name)
        for name in cls.HF_IGNORED:
            keys.take(name, default=None)
        return fields

    def to_hf(self) -> JsonObject:
        """The keys that the family writes to config.json.

        Raises:
            UserError: HF_ARCHITECTURE cannot compute this model.
        """
        fields = {row.names[0]: row.write(getattr(self, name)) for name, row in self.hf_rows().items()}
        fixed = {name: only.allowed[0] for name, only in self.HF_FIXED.items() if only.is_written}
        return {**fields, **fixed, **self.HF_WRITTEN}

    @classmethod
    def hf_rows(cls) -> dict[str, Hf]:
        """The rows by field."""
        return {name: row for name, row in {**marks(cls, Hf), **cls.HF_ROWS}.items() if row is not None}


def _kinds(annotation: object) -> list[object]:
    """The types that an annotation allows, without their limits."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in _kinds(member)]
    return [annotation]
