"""Qwen2 and Qwen2.5 (Yang et al. 2024, arXiv:2407.10671): Llama with biases on q, k and v."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, JsonObject
from mesh_transformer.families.llama import LlamaLike
from mesh_transformer.fields import CountOrZero, Tokens, Unit
from mesh_transformer.spec import AttentionSpec


class QwenLike(LlamaLike):
    """Llama with a sliding window from a layer on."""

    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 22016,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }
    HF_END_OF_TEXT: ClassVar = 151643

    window: Tokens | None = None
    """number of tokens that a query sees in layers with a sliding window, the last of them its own; absent: no layer
    has one"""
    full_layers: Annotated[CountOrZero | None, Unit("layers")] = None
    """number of first layers without a window; needs window"""

    @model_validator(mode="after")
    def _check_window(self) -> Self:
        if (self.window is None) != (self.full_layers is None):
            given, missing = ("full_layers", "window") if self.window is None else ("window", "full_layers")
            raise UserError(f"model.{given} needs model.{missing}: set both or neither")
        return self

    def windows(self) -> list[int | None]:
        """See `LlamaLike`."""
        return [None if i < (self.full_layers or 0) else self.window for i in range(self.layers)]

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `LlamaLike`."""
        fields = super().fields_from_hf(keys)
        window = keys.size("sliding_window", default=4096, null=True)
        windowed = keys.flag("use_sliding_window", default=False)
        full = keys.size("max_window_layers", default=28, least=0, null=not windowed)
        types = keys.take("layer_types", default=None)
        if not windowed:
            window = None
        if window is not None:
            fields |= {"window": window, "full_layers": full}
        expected = [
            "sliding_attention" if window is not None and i >= full else "full_attention"
            for i in range(fields["layers"])
        ]
        if types is not None and types != expected:
            raise UserError(
                f"layer_types is {types!r:.100}: only full attention in the first max_window_layers layers and a "
                "sliding window in the others is supported"
            )
        return fields

    def to_hf(self) -> JsonObject:
        """See `ModelConfig`."""
        return {
            **super().to_hf(),
            "use_sliding_window": self.window is not None,
            "sliding_window": self.window,
            "max_window_layers": self.layers if self.full_layers is None else self.full_layers,
        }


class Qwen2Config(QwenLike):
    """Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a sliding window from a layer on."""

    HF_MODEL_TYPE: ClassVar = "qwen2"
    HF_ARCHITECTURE: ClassVar = "Qwen2ForCausalLM"
    GGUF: ClassVar = Gguf("qwen2")

    family: Literal["qwen2"] = "qwen2"
    """model family: a file in mesh_transformer/families"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), bias=True)
