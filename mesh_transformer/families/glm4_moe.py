"""GLM-4.5 and 4.6 (GLM-4.5 Team 2025, arXiv:2508.06471): experts as in DeepSeek-V3, and shared keys and values."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.experts import SigmoidExperts
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.rotary import PartlyRotary
from mesh_transformer.fields import Positive, Switch
from mesh_transformer.spec import AttentionSpec


class Glm4MoeConfig(SigmoidExperts, PartlyRotary):
    """GLM-4.5: dense first layers, experts that are chosen by sigmoid and bias, and a part of each head rotated."""

    HF_MODEL_TYPE: ClassVar = "glm4_moe"
    HF_ARCHITECTURE: ClassVar = "Glm4MoeForCausalLM"
    GGUF: ClassVar = Gguf("glm4moe", gating=2, names={"e_score_correction_bias": "e_score_correction.bias"})
    HF_END_OF_TEXT: ClassVar = 151329
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }

    family: Literal["glm4_moe"] = "glm4_moe"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-5
    """epsilon that each norm adds to the mean square"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = False
    """biases on q, k and v"""
    qk_norm: Annotated[Switch, Hf("use_qk_norm")] = False
    """a norm of each head of q and k"""
    router_normalize: Annotated[Switch, Hf("norm_topk_prob")] = True
    """the weights of a token's experts are divided by their sum"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), bias=self.attention_bias, qk_norm=self.norm() if self.qk_norm else None)
