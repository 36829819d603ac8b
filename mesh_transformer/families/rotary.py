"""The rotary encoding of the families after GPT-NeoX: its fields, and its keys in config.json."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Le
from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.families.hf_keys import ConfigJson, JsonObject
from mesh_transformer.fields import Derived, Dims, Positive, Real, Switch, Tokens
from mesh_transformer.spec import Rotary, Scaling

# turns of a frequency in the original context: outside of this range, their logarithm may not be finite
Turns = Annotated[Real, Ge(1e-6), Le(1e6)]

Scalings = Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]
_SCALINGS: Scalings = {
    "none": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_seq",)),
    "yarn": (("factor",), ("original_seq", "beta_fast", "beta_slow", "attention_factor", "truncate")),
}
_HF_NAMES = {
    "original_seq": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
}


class RotaryConfig(ModelConfig):
    """A family with rotary encoding, which can be stretched to a longer context."""

    # the field of the rotated dims of a head
    ROTARY_FIELD: ClassVar = "d_head"
    # the values of rotary_scaling: the required and the optional fields of each
    SCALINGS: ClassVar[Scalings] = _SCALINGS
    # other names of their kinds in config.json
    HF_SCALINGS: ClassVar[Mapping[str, str]] = {}

    rotary_base: Positive = 10000.0
    """base of the rotary frequencies"""
    rotary_scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    """how the rotary frequencies are lowered for a context longer than the original one: linear: all frequencies;
    llama3 and yarn: only the low ones"""
    rotary_factor: Positive | None = None
    """linear, llama3, yarn: the number that divides the frequencies"""
    rotary_original_seq: Annotated[Tokens | None, Derived("model.seq")] = None
    """llama3, yarn: the longest context before it was stretched"""
    rotary_low_freq_factor: Positive | None = None
    """llama3: a frequency with fewer turns than this in the original context is divided"""
    rotary_high_freq_factor: Positive | None = None
    """llama3: a frequency with more turns than this in the original context stays"""
    rotary_beta_fast: Annotated[Turns | None, Derived("32")] = None
    """yarn: a frequency with more turns than this in the original context stays"""
    rotary_beta_slow: Annotated[Turns | None, Derived("1")] = None
    """yarn: a frequency with fewer turns than this in the original context is divided"""
    rotary_attention_factor: Annotated[Positive | None, Derived("0.1 ln(rotary_factor) + 1")] = None
    """yarn: the number that multiplies sines and cosines"""
    rotary_truncate: Annotated[Switch | None, Derived("true")] = None
    """yarn: the range between the two betas ends at whole dims"""

    @model_validator(mode="after")
    def _check_rotary(self) -> Self:
        self.check_rotary(self.ROTARY_FIELD, self._rotary_dims)
        needed, optional = self.SCALINGS[self.rotary_scaling]
        known = {**_SCALINGS, **self.SCALINGS}
        for name in sorted({name for fields in known.values() for names in fields for name in names}):
            given = self._scaling_field(name) is not None
            if given and name not in (*needed, *optional):
                kinds = [kind for kind, fields in self.SCALINGS.items() if name in sum(fields, ())]
                instead = f", or set model.rotary_scaling to {' or '.join(kinds)}" if kinds else ""
                raise UserError(
                    f"model.rotary_{name} has no effect with model.rotary_scaling {self.rotary_scaling}: remove it"
                    f"{instead}"
                )
            if not given and name in needed:
                raise UserError(f"model.rotary_scaling {self.rotary_scaling} needs model.rotary_{name}: set it")
        if self.rotary_scaling == "yarn" and self.rotary_base <= 1:
            raise UserError(f"model.rotary_base {self.rotary_base:g} must be over 1 with model.rotary_scaling yarn")
        low, high = self.rotary_low_freq_factor, self.rotary_high_freq_factor
        if low and high and low >= high:
            raise UserError(
                f"model.rotary_low_freq_factor {low:g} must be less than model.rotary_high_freq_factor {high:g}"
            )
        return self

    def _scaling_field(self, name: str) -> Any:
        return getattr(self, f"rotary_{name}")

    @property
    def _rotary_dims(self) -> int:
        dims: int = getattr(self, self.ROTARY_FIELD)
        return dims

    def rotary(self) -> Rotary:
        """The rotary encoding of all layers."""
        return Rotary(dims=self._rotary_dims, style="halves", base=self.rotary_base, scaling=self.scaling())

    def scaling(self) -> Scaling | None:
        """How the frequencies are lowered."""
        if self.rotary_scaling == "none":
            return None
        names = [name for names in self.SCALINGS[self.rotary_scaling] for name in names]
        given = {name: value for name in names if (value := self._scaling_field(name)) is not None}
        given.setdefault("original_seq", self.seq)
        if self.rotary_scaling == "yarn":
            given.setdefault("attention_factor", self.attention_factor(given["factor"]))
        return Scaling(kind=self.rotary_scaling, **given)

    def attention_factor(self, factor: float) -> float:
        """The factor of yarn's sines and cosines, if rotary_attention_factor is absent."""
        return yarn_factor(factor)

    @classmethod
    def mscales_from_hf(cls, fields: JsonObject, mscale: float | None, all_dims: float | None) -> JsonObject:
        """The fields for yarn's magnitudes in config.json. `fields`: the rotary fields read so far."""
        if fields["rotary_scaling"] != "yarn" or fields["rotary_attention_factor"] is not None:
            return {}
        # without a factor the config is refused
        factor = fields["rotary_factor"]
        if factor and mscale and all_dims:
            return {"rotary_attention_factor": yarn_factor(factor, mscale) / yarn_factor(factor, all_dims)}
        return {}

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        fields = super().fields_from_hf(keys)
        return {**fields, **cls.rotary_from_hf(keys, fields)}

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        return {**super().to_hf(), **self.rotary_to_hf()}

    @classmethod
    def rotary_from_hf(cls, keys: ConfigJson, others: JsonObject) -> JsonObject:
        """The rotary fields in the keys of transformers 5 (`rope_parameters`) or of earlier versions.

        Args:
            others: the fields read so far.

        Raises:
            UserError: the kind of scaling is not supported.
        """
        given = {name: keys.take(name, default=None) for name in ("rope_theta", "partial_rotary_factor")}
        # transformers reads rope_scaling first
        older, newer = keys.take("rope_scaling", default=None), keys.take("rope_parameters", default=None)
        values = older or newer or {}
        if not isinstance(values, dict):
            raise UserError(f"rope_parameters is {values!r:.60}: expected an object")
        rope = ConfigJson({**{name: value for name, value in given.items() if value is not None}, **values})
        kind = rope.take("rope_type", "type", default="default")
        if kind == "dynamic":
            # its base grows beyond max_position_embeddings, and no sequence here is longer
            rope.number("factor", default=1.0)
            kind = "default"
        scaling = {"default": "none", **cls.HF_SCALINGS}.get(kind, kind) if isinstance(kind, str) else ""
        if scaling not in cls.SCALINGS:
            names = ["default", *(name for name in cls.SCALINGS if name != "none")]
            known = f"{', '.join(names[:-1])} and {names[-1]} are"
            raise UserError(f"rope_type is {kind!r:.60}: only {known} supported")
        part = rope.number("partial_rotary_factor", default=cls.HF_DEFAULTS.get("partial_rotary_factor", 1.0), most=1)
        fields: JsonObject = {
            **cls.part_from_hf(part, others),
            "rotary_base": rope.number("rope_theta", default=cls.HF_DEFAULTS.get("rope_theta", 10000.0)),
            "rotary_scaling": scaling,
        }
        mscale, all_dims = (rope.number(name, default=None, zero=True) for name in ("mscale", "mscale_all_dim"))
        for name in [name for names in cls.SCALINGS[scaling] for name in names]:
            take = rope.number if name == "factor" else rope.take
            fields[f"rotary_{name}"] = take(_HF_NAMES.get(name, name), default=None)
        fields |= cls.mscales_from_hf(fields, mscale, all_dims)
        try:
            rope.refuse_rest()
        except UserError as error:
            raise UserError(f"rope_parameters: {error}") from error
        return fields

    @classmethod
    def part_from_hf(cls, part: float, others: JsonObject) -> JsonObject:
        """The fields for the part of a head that is rotated. `others`: the fields read so far.

        Raises:
            UserError: the family rotates whole heads, and it is not 1.
        """
        if part != 1:
            raise UserError("partial_rotary_factor is not 1: this family rotates whole heads")
        return {}

    def rotary_to_hf(self) -> JsonObject:
        """The keys of config.json for the rotary fields, for transformers 5 and for earlier versions."""
        kind = "default" if self.rotary_scaling == "none" else self.rotary_scaling
        values: dict[str, Any] = {"rope_type": kind}
        for name in [name for names in self.SCALINGS[self.rotary_scaling] for name in names]:
            if (value := self._scaling_field(name)) is not None:
                values[_HF_NAMES.get(name, name)] = value
        return {
            "rope_parameters": {**values, "rope_theta": self.rotary_base},
            "rope_theta": self.rotary_base,
            "rope_scaling": None if kind == "default" else {**values, "rope_theta": self.rotary_base},
        }


class PartlyRotary(RotaryConfig):
    """A family that may rotate a part of each head."""

    ROTARY_FIELD: ClassVar = "rotary_dims"

    rotary_dims: Annotated[Dims, Derived("d_head", of="d_head")] = 0
    """number of leading dims of each head that rotary encoding rotates: an even number, at most d_head"""

    @classmethod
    def part_from_hf(cls, part: float, others: JsonObject) -> JsonObject:
        """See `RotaryConfig`."""
        d_head = others.get("d_head") or others["d_model"] // others["n_heads"]
        return {"rotary_dims": int(d_head * part)}

    def rotary_to_hf(self) -> JsonObject:
        """See `RotaryConfig`."""
        part, keys = part_of_head(self.rotary_dims, self.d_head), super().rotary_to_hf()
        for name in ("rope_parameters", "rope_scaling"):
            keys[name] = keys[name] and {**keys[name], "partial_rotary_factor": part}
        return {**keys, "partial_rotary_factor": part}


def part_of_head(dims: int, d_head: int) -> float:
    """The part of a head in which transformers rotates `dims` dims. It rounds down: a rounding error would cost one
    dim."""
    part = dims / d_head
    return math.nextafter(part, 1) if int(d_head * part) < dims else part


def yarn_factor(factor: float, mscale: float = 1.0) -> float:
    """The factor of sines and cosines in a context that is `factor` times as long (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1
