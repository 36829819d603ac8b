"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama with a sliding window."""

from typing import Annotated, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.layer_types import FULL, SLIDING
from mesh_transformer.families.llama import LlamaLike
from mesh_transformer.fields import Tokens


class MistralLike(LlamaLike):
    """Llama with a sliding window in every layer."""

    window: Annotated[Tokens | None, Hf("sliding_window")] = None
    """number of tokens that a query sees, the last of them its own; absent: all before it"""

    def windows(self) -> list[int | None]:
        """See `LlamaLike`."""
        return [self.window] * self.layers

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `HfKeys`. A config.json may list the kind of each layer: all are of one."""
        fields, types = super().fields_from_hf(keys), keys.take("layer_types", default=None)
        kind = FULL if fields.get("window") is None else SLIDING
        if types not in (None, [kind] * fields["layers"]):
            raise UserError(f"layer_types is {types!r:.100}: only {kind} in each layer is supported")
        return fields


class MistralConfig(MistralLike):
    """Mistral: Llama with a sliding window in every layer."""

    HF_MODEL_TYPE: ClassVar = "mistral"
    HF_ARCHITECTURE: ClassVar = "MistralForCausalLM"
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    }

    family: Literal["mistral"] = "mistral"
    """model family: a file in mesh_transformer/families"""
