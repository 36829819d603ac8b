"""SmolLM3 (Hugging Face 2025): Llama in which some layers have no rotary encoding."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject, Only
from mesh_transformer.families.layer_types import FULL, as_every, every, one_of
from mesh_transformer.families.llama import BiasedLlama
from mesh_transformer.fields import Count, Derived, LayerNumbers, Switch, Unit
from mesh_transformer.spec import Rotary

# in the released model
_EVERY = 4


class SmolLM3Config(BiasedLlama):
    """SmolLM3: Llama without rotary encoding in every fourth layer."""

    HF_MODEL_TYPE: ClassVar = "smollm3"
    HF_ARCHITECTURE: ClassVar = "SmolLM3ForCausalLM"
    GGUF: ClassVar = Gguf("smollm3", rules=("permuted_heads",), assumed={"no_rotary_every": 4})
    HF_END_OF_TEXT: ClassVar = 128001
    HF_FIXED: ClassVar = {**BiasedLlama.HF_FIXED, "use_sliding_window": Only(False)}
    # without windows the first two have no effect; transformers ignores the last
    HF_IGNORED: ClassVar = ("sliding_window", "max_window_layers", "pretraining_tp")
    # their default is outside of a small vocabulary
    HF_WRITTEN: ClassVar = {**BiasedLlama.HF_WRITTEN, "pad_token_id": None}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 36,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 11008,
        "vocab_size": 128256,
        "max_position_embeddings": 32768,
        "rope_theta": 2000000.0,
    }

    family: Literal["smollm3"] = "smollm3"
    """model family: a file in mesh_transformer/families"""
    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = True
    """the head uses the token embeddings as its weights"""
    no_rotary_every: Annotated[Count | None, Unit("layers"), Derived("4, without no_rotary_layers")] = None
    """the last of each no_rotary_every layers has no rotary encoding"""
    no_rotary_layers: LayerNumbers | None = None
    """instead of no_rotary_every: the layers without rotary encoding, numbered from 0"""

    @classmethod
    def derive(cls, values: JsonObject) -> JsonObject:
        """Derive no_rotary_every too."""
        return one_of(super().derive(values), "no_rotary_every", "no_rotary_layers", _EVERY)

    @model_validator(mode="after")
    def _check_no_rotary_layers(self) -> Self:
        self.check_layers("no_rotary_layers", self.no_rotary_layers or ())
        return self

    def not_rotated(self) -> list[int]:
        """The layers without rotary encoding."""
        if self.no_rotary_layers is not None:
            return list(self.no_rotary_layers)
        assert self.no_rotary_every is not None
        return every(self.no_rotary_every, self.layers)

    def rotaries(self) -> list[Rotary]:
        """See `LlamaLike`."""
        rotary, none = self.rotary(), set(self.not_rotated())
        absent = replace(rotary, base=None, scaling=None)
        return [absent if layer in none else rotary for layer in range(self.layers)]

    def architecture(self) -> JsonObject:
        """See `ModelConfig`. Two forms of one list are no difference."""
        fields = super().architecture()
        del fields["no_rotary_every"]
        return {**fields, "no_rotary_layers": self.not_rotated()}

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`."""
        fields, types = super().fields_from_hf(keys), keys.take("layer_types", default=None)
        layers: int = fields["layers"]
        if types is not None and types != [FULL] * layers:
            raise UserError(f"layer_types is {types!r:.100}: only {FULL} in each layer is supported")
        n = keys.size("no_rope_layer_interval", default=_EVERY)
        rotated = keys.take("no_rope_layers", default=None)
        if rotated is None:
            return {**fields, "no_rotary_every": n}
        if not isinstance(rotated, list) or not all(type(flag) is int and flag in (0, 1) for flag in rotated):
            raise UserError(f"no_rope_layers is {rotated!r:.100}: expected a list of 0 (no rotary encoding) and 1")
        if len(rotated) != layers:
            raise UserError(f"no_rope_layers has {len(rotated)} entries for {layers} layers: give one for each")
        none = [layer for layer, flag in enumerate(rotated) if not flag]
        n = as_every(none, layers, _EVERY)
        return {**fields, "no_rotary_every": n} if n else {**fields, "no_rotary_layers": tuple(none)}

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        none = set(self.not_rotated())
        return {
            **super().to_hf(),
            "no_rope_layers": [int(layer not in none) for layer in range(self.layers)],
            "layer_types": [FULL] * self.layers,
        }
