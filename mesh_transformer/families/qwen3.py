"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): Qwen2 with norms of q and k instead of biases."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.qwen2 import QwenLike
from mesh_transformer.fields import Switch
from mesh_transformer.spec import AttentionSpec


class Qwen3Config(QwenLike):
    """Qwen3: Llama with a norm of each head of q and k, and a sliding window from a layer on."""

    HF_MODEL_TYPE: ClassVar = "qwen3"
    HF_ARCHITECTURE: ClassVar = "Qwen3ForCausalLM"
    HF_DEFAULTS: ClassVar = {**QwenLike.HF_DEFAULTS, "head_dim": 128}

    family: Literal["qwen3"] = "qwen3"
    """model family: a file in mesh_transformer/families"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = False
    """biases on q, k, v and the output of the attention"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        bias = self.attention_bias
        return replace(super().attention(), bias=bias, out_bias=bias, qk_norm=self.norm())
