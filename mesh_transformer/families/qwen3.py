"""Qwen3 (Yang et al. 2025, arXiv:2505.09388): Qwen2 with norms of q and k instead of biases."""

from dataclasses import replace
from typing import ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.llama import BiasedAttention
from mesh_transformer.families.qwen2 import QwenLike
from mesh_transformer.spec import AttentionSpec


class Qwen3Config(BiasedAttention, QwenLike):
    """Qwen3: Llama with a norm of each head of q and k, and a sliding window from a layer on."""

    HF_MODEL_TYPE: ClassVar = "qwen3"
    HF_ARCHITECTURE: ClassVar = "Qwen3ForCausalLM"
    GGUF: ClassVar = Gguf("qwen3")
    HF_DEFAULTS: ClassVar = {**QwenLike.HF_DEFAULTS, "head_dim": 128}

    family: Literal["qwen3"] = "qwen3"
    """model family: a file in mesh_transformer/families"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm())
