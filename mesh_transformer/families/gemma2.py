"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): Gemma with norms after each sublayer, capped logits and windows."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ConfigJson
from mesh_transformer.families.gemma import GemmaLike
from mesh_transformer.fields import Derived, Dims, Positive, Tokens, size
from mesh_transformer.spec import Attends, Attention, Decoder, Layer, Mechanism, sandwich


class Gemma2Config(GemmaLike):
    """Gemma 2: Gemma with a second norm for each sublayer, capped logits, and a window in every other layer."""

    HF_MODEL_TYPE: ClassVar = "gemma2"
    HF_ARCHITECTURE: ClassVar = "Gemma2ForCausalLM"
    HF_HEADS_DIVIDE_WIDTH: ClassVar = True
    HF_ACTIVATIONS: ClassVar = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    }

    family: Literal["gemma2"] = "gemma2"
    """model family: a file in mesh_transformer/families"""
    window: Tokens | None = None
    """number of tokens that a query sees in the first, third ... layer, the last of them its own; absent: all"""
    query_scale_dims: Annotated[Dims, Derived("d_head")] = 0
    """the products of queries and keys are divided by the square root of this number (their query_pre_attn_scalar)"""
    attention_softcap: Positive | None = None
    """cap of the scaled products of queries and keys; absent: none"""
    softcap: Positive | None = None
    """cap of the logits; absent: none"""

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Derive query_scale_dims too."""
        values = super().derive(values)
        if d_head := size(values.get("d_head")):
            values.setdefault("query_scale_dims", d_head)
        return values

    def attention(self) -> Attention:
        """See `LlamaLike`."""
        return replace(super().attention(), scale=self.query_scale_dims**-0.5, softcap=self.attention_softcap)

    def layer(self, attention: Attends, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        return sandwich(self.norm(), attention, ff)

    def windows(self) -> list[int | None]:
        """See `LlamaLike`."""
        return [self.window if i % 2 == 0 else None for i in range(self.layers)]

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), softcap=self.softcap)

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> dict[str, Any]:
        """See `LlamaLike`."""
        activation = keys.take("hidden_activation", default=cls.HF_ACTIVATIONS[0])
        if activation not in cls.HF_ACTIVATIONS:
            raise UserError(
                f"hidden_activation is {activation!r:.60}: only {', '.join(cls.HF_ACTIVATIONS)} is supported"
            )
        # transformers ignores it
        keys.take("hidden_act", default=None)
        fields = super().fields_from_hf(keys)
        types = keys.take("layer_types", default=None)
        if types is not None and types != [_TYPES[i % 2] for i in range(fields["layers"])]:
            raise UserError(f"layer_types is {types!r:.100}: only {' and '.join(_TYPES)} in turn are supported")
        return {
            **fields,
            "window": keys.size("sliding_window", default=4096, null=True),
            "query_scale_dims": keys.size("query_pre_attn_scalar", default=256),
            "attention_softcap": keys.number("attn_logit_softcapping", default=50.0, null=True),
            "softcap": keys.number("final_logit_softcapping", default=30.0, null=True),
        }

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        keys = super().to_hf()
        return {
            **keys,
            "hidden_activation": keys.pop("hidden_act"),
            "sliding_window": self.window,
            "query_pre_attn_scalar": self.query_scale_dims,
            "attn_logit_softcapping": self.attention_softcap,
            "final_logit_softcapping": self.softcap,
        }

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {
            "norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "ff_norm": "pre_feedforward_layernorm",
            "ff_post_norm": "post_feedforward_layernorm",
        }


_TYPES = ("sliding_attention", "full_attention")
