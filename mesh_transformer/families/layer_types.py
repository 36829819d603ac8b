"""Families with a sliding window in some layers, which may have a rotary encoding of their own."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.llama import LlamaLike
from mesh_transformer.fields import Count, Derived, Positive, Tokens, Unit
from mesh_transformer.spec import Rotary

LayerType = Literal["sliding_attention", "full_attention"]
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"


def every(n: int, layers: int) -> list[int]:
    """The last of each n layers, numbered from 0."""
    return list(range(n - 1, layers, n))


def as_every(numbers: list[int], layers: int, usual: int) -> int | None:
    """The period n if the layers are every n-th layer, else None. `usual` is tried first."""
    tried = [usual, *(number + 1 for number in numbers[:1])]
    return next((n for n in tried if numbers == every(n, layers)), None)


def one_of(values: JsonObject, count: str, listed: str, usual: int) -> JsonObject:
    """The fields with a default: the usual value of `count`, if both `count` and `listed` are absent.

    Raises:
        UserError: both are given.
    """
    if count in values and listed in values:
        raise UserError(f"model.{count} has no effect with model.{listed}: remove one of them")
    return values if count in values or listed in values else {**values, count: usual}


class WithLayerTypes(LlamaLike):
    """Some layers have a sliding window, and the others have none. A family repeats `full_every` with its default."""

    # full_every in the released models
    FULL_EVERY: ClassVar[int]

    window: Annotated[Tokens | None, Hf("sliding_window")] = None
    """number of tokens that a query sees in layers with a sliding window, the last of them its own; absent: all"""
    full_every: Annotated[Count | None, Unit("layers"), Derived("without layer_types, as in the released models")] = (
        None
    )
    """the last of each full_every layers has no window, and the others have one"""
    layer_types: Annotated[tuple[LayerType, ...] | None, Unit("one for each layer")] = None
    """instead of full_every: which layers have a window"""

    @classmethod
    def derive(cls, values: JsonObject) -> JsonObject:
        """Derive full_every too."""
        return one_of(super().derive(values), "full_every", "layer_types", cls.FULL_EVERY)

    @model_validator(mode="after")
    def _check_layer_types(self) -> Self:
        if self.layer_types is not None and len(self.layer_types) != self.layers:
            raise UserError(
                f"model.layer_types has {len(self.layer_types)} entries for model.layers {self.layers}: give one for "
                "each layer"
            )
        return self

    def types(self) -> list[LayerType]:
        """The type of each layer."""
        if self.layer_types is not None:
            return list(self.layer_types)
        assert self.full_every is not None
        full = set(every(self.full_every, self.layers))
        return [FULL if layer in full else SLIDING for layer in range(self.layers)]

    def windows(self) -> list[int | None]:
        """See `LlamaLike`."""
        return [self.window if kind == SLIDING else None for kind in self.types()]

    def architecture(self) -> JsonObject:
        """See `ModelConfig`. Two forms of one list are no difference."""
        fields = super().architecture()
        del fields["full_every"]
        return {**fields, "layer_types": self.types()}

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        fields, types = super().fields_from_hf(keys), keys.take("layer_types", default=None)
        pattern = cls.full_every_from_hf(keys)
        if types is None:
            return {**fields, "full_every": pattern}
        if not isinstance(types, list) or not all(kind in (SLIDING, FULL) for kind in types):
            raise UserError(f"layer_types is {types!r:.100}: expected a list of {SLIDING} and {FULL}")
        if len(types) != fields["layers"]:
            raise UserError(f"layer_types has {len(types)} entries for {fields['layers']} layers: give one for each")
        full = [layer for layer, kind in enumerate(types) if kind == FULL]
        n = as_every(full, fields["layers"], cls.FULL_EVERY)
        return {**fields, "full_every": n} if n else {**fields, "layer_types": tuple(types)}

    @classmethod
    def full_every_from_hf(cls, keys: ConfigJson) -> int:
        """The value of full_every, if config.json does not list the layers."""
        return cls.FULL_EVERY

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        return {**super().to_hf(), "layer_types": list(self.types())}


class WithLocalRotary(WithLayerTypes):
    """The layers with a window have a rotary encoding without scaling, of a base of their own."""

    # the key of config.json for its base before transformers 5; None: it was rope_theta
    HF_LOCAL_BASE: ClassVar[str | None] = None

    local_rotary_base: Annotated[Positive, Derived("rotary_base")] = 0.0
    """base of the rotary frequencies in layers with a window, where they are not scaled"""

    @classmethod
    def derive(cls, values: JsonObject) -> JsonObject:
        """Derive local_rotary_base too."""
        base = cls.model_fields["rotary_base"].default
        return {"local_rotary_base": values.get("rotary_base", base), **super().derive(values)}

    def rotaries(self) -> list[Rotary]:
        """See `LlamaLike`."""
        full = self.rotary()
        local = replace(full, base=self.local_rotary_base, scaling=None)
        return [local if kind == SLIDING else full for kind in self.types()]

    @classmethod
    def rotary_from_hf(cls, keys: ConfigJson, others: JsonObject) -> JsonObject:
        """See `RotaryConfig`. transformers 5 has the parameters of each type of layer in `rope_parameters`."""
        base = keys.take("rope_theta", default=None)
        name = cls.HF_LOCAL_BASE
        local = base if name is None else keys.number(name, default=cls.HF_DEFAULTS[name])
        scaling = _object("rope_scaling", keys)
        by_type = _object("rope_parameters", keys)
        if not by_type.keys() <= {SLIDING, FULL}:
            raise UserError(f"rope_parameters is {by_type!r:.100}: expected an object for each of {SLIDING} and {FULL}")
        full, sliding = (_object(kind, ConfigJson(by_type)) for kind in (FULL, SLIDING))
        fields = super().rotary_from_hf(ConfigJson({"rope_theta": base, "rope_scaling": {**full, **scaling}}), others)
        of_window = super().rotary_from_hf(ConfigJson({"rope_theta": local, "rope_parameters": sliding}), others)
        if of_window["rotary_scaling"] != "none":
            raise UserError(
                f"rope_parameters: the rope_type of {SLIDING} is {of_window['rotary_scaling']!r}: only default is "
                "supported there"
            )
        return {**fields, "local_rotary_base": of_window["rotary_base"]}

    def rotary_to_hf(self) -> JsonObject:
        """See `RotaryConfig`."""
        keys = super().rotary_to_hf()
        local = {"rope_type": "default", "rope_theta": self.local_rotary_base}
        older = {} if self.HF_LOCAL_BASE is None else {self.HF_LOCAL_BASE: self.local_rotary_base}
        return {**keys, **older, "rope_parameters": {FULL: keys["rope_parameters"], SLIDING: local}}


def _object(name: str, keys: ConfigJson) -> JsonObject:
    value = keys.take(name, default=None) or {}
    if not isinstance(value, dict):
        raise UserError(f"{name} is {value!r:.60}: expected an object")
    return value
