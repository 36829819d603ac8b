"""Qwen3 with experts (Yang et al. 2025, arXiv:2505.09388): Qwen3-30B-A3B, Qwen3-235B-A22B."""

from dataclasses import replace
from typing import ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Only
from mesh_transformer.families.llama import BiasedAttention
from mesh_transformer.families.qwen2_moe import QwenExperts
from mesh_transformer.spec import AttentionSpec


class Qwen3MoeConfig(BiasedAttention, QwenExperts):
    """Qwen3-MoE: Llama with a norm of each head of q and k, and experts."""

    HF_MODEL_TYPE: ClassVar = "qwen3_moe"
    HF_ARCHITECTURE: ClassVar = "Qwen3MoeForCausalLM"
    GGUF: ClassVar = Gguf("qwen3moe", assumed={"router_normalize": True})
    # of Qwen3-Coder; transformers ignores it
    HF_FIXED: ClassVar = {**QwenExperts.HF_FIXED, "use_qk_norm": Only(True, written=False)}
    HF_DEFAULTS: ClassVar = {
        **QwenExperts.HF_DEFAULTS,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }

    family: Literal["qwen3_moe"] = "qwen3_moe"
    """model family: a file in mesh_transformer/families"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm())
