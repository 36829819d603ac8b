"""GLM-4 of 2025 (GLM-4-0414): Llama with norms around each sublayer, and pairs of a part of each head rotated."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.llama import LlamaLike
from mesh_transformer.families.rotary import PartlyRotary
from mesh_transformer.fields import Positive, Switch
from mesh_transformer.spec import AttentionMixer, AttentionSpec, Layer, Mechanism, Rotary, sandwich


class Glm4Config(LlamaLike, PartlyRotary):
    """GLM-4: Llama with norms before and after each sublayer, which rotates pairs of dims of a part of each head."""

    HF_MODEL_TYPE: ClassVar = "glm4"
    HF_ARCHITECTURE: ClassVar = "Glm4ForCausalLM"
    GGUF: ClassVar = Gguf("glm4")
    HF_END_OF_TEXT: ClassVar = 151329
    HF_FUSED_GATE: ClassVar = True
    # their default is outside of a small vocabulary
    HF_WRITTEN: ClassVar = {**LlamaLike.HF_WRITTEN, "pad_token_id": None}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 40,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 13696,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
    }

    family: Literal["glm4"] = "glm4"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1.5625e-7
    """epsilon that each norm adds to the mean square"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = True
    """biases on q, k and v"""

    def rotary(self) -> Rotary:
        """See `RotaryConfig`."""
        return replace(super().rotary(), style="pairs")

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), bias=self.attention_bias)

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        return sandwich(self.norm(), attention, ff)

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {
            "norm": "input_layernorm",
            "attention_post_norm": "post_self_attn_layernorm",
            "ff_norm": "post_attention_layernorm",
            "ff_post_norm": "post_mlp_layernorm",
        }
