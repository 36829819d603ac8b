"""Gemma 2 (Gemma Team 2024, arXiv:2408.00118): Gemma with norms after each sublayer, capped logits and windows."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gemma import GemmaLike
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, Only
from mesh_transformer.families.layer_types import WithLayerTypes
from mesh_transformer.fields import Count, Derived, Dims, Positive, Unit
from mesh_transformer.spec import AttentionMixer, AttentionSpec, Decoder, Layer, Mechanism, sandwich


class Gemma2Like(GemmaLike, WithLayerTypes):
    """Gemma with a second norm for each sublayer, capped logits, and windows in some layers."""

    HF_HEADS_DIVIDE_WIDTH: ClassVar = True
    HF_FIXED: ClassVar = {"hidden_activation": Only("gelu_pytorch_tanh", "gelu_new", "gelu_fast")}
    # transformers ignores it
    HF_IGNORED: ClassVar = (*GemmaLike.HF_IGNORED, "hidden_act")
    HF_WRITTEN: ClassVar = {**GemmaLike.HF_WRITTEN, "hidden_act": "gelu_pytorch_tanh"}

    query_scale_dims: Annotated[Dims, Derived("d_head", of="d_head"), Hf("query_pre_attn_scalar")] = 0
    """the products of queries and keys are divided by the square root of this number (their query_pre_attn_scalar)"""
    softcap: Annotated[Positive | None, Hf("final_logit_softcapping")] = None
    """cap of the logits; absent: none"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), scale=self.query_scale_dims**-0.5)

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        return sandwich(self.norm(), attention, ff)

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), softcap=self.softcap)

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {
            "norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "ff_norm": "pre_feedforward_layernorm",
            "ff_post_norm": "post_feedforward_layernorm",
        }


class Gemma2Config(Gemma2Like):
    """Gemma 2: Gemma with a second norm for each sublayer, capped logits, and a window in every other layer."""

    HF_MODEL_TYPE: ClassVar = "gemma2"
    HF_ARCHITECTURE: ClassVar = "Gemma2ForCausalLM"
    GGUF: ClassVar = Gguf(
        "gemma2",
        rules=("norm_plus_one",),
        assumed={"window": 4096, "attention_softcap": 50.0, "softcap": 30.0},
        wide_queries=46,
    )
    FULL_EVERY: ClassVar = 2
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    family: Literal["gemma2"] = "gemma2"
    """model family: a file in mesh_transformer/families"""
    full_every: Annotated[Count | None, Unit("layers"), Derived("2, without layer_types")] = None
    """the last of each full_every layers has no window, and the others have one"""
    attention_softcap: Annotated[Positive | None, Hf("attn_logit_softcapping")] = None
    """cap of the scaled products of queries and keys; absent: none"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), softcap=self.attention_softcap)
