"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437): DeepSeek-V2 with other routers."""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ConfigJson
from mesh_transformer.families.deepseek_v2 import DeepSeekLike
from mesh_transformer.fields import Switch
from mesh_transformer.spec import Router

_METHOD = "noaux_tc"


class DeepSeekV3Config(DeepSeekLike):
    """DeepSeek-V3: latent attention, and experts that are chosen by sigmoid and bias, after some dense layers."""

    HF_MODEL_TYPE: ClassVar = "deepseek_v3"
    HF_ARCHITECTURE: ClassVar = "DeepseekV3ForCausalLM"
    HF_END_OF_TEXT: ClassVar = 1
    HF_SCORES: ClassVar = "sigmoid"
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "intermediate_size": 18432,
        "vocab_size": 129280,
        "max_position_embeddings": 4096,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    }

    family: Literal["deepseek_v3"] = "deepseek_v3"
    """model family: a file in mesh_transformer/families"""
    router_normalize: Switch = True
    """the weights of a token's experts are divided by their sum"""

    def router(self) -> Router:
        """See `WithExperts`."""
        return replace(super().router(), scores="sigmoid", bias=True, group_score="two_best", eps=1e-20)

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> dict[str, Any]:
        """See `LlamaLike`."""
        if (method := keys.take("topk_method", default=_METHOD)) != _METHOD:
            raise UserError(f"topk_method is {method!r:.60}: only {_METHOD} is supported")
        # the layers that predict later tokens are not read
        keys.take("num_nextn_predict_layers", "num_mtp_layers", default=None)
        return {**super().fields_from_hf(keys), "router_normalize": keys.flag("norm_topk_prob", default=True)}

    def to_hf(self) -> dict[str, Any]:
        """See `ModelConfig`."""
        return {**super().to_hf(), "topk_method": _METHOD, "rope_interleave": True, "num_nextn_predict_layers": 0}

    def hf_unused(self, stored: Collection[str]) -> set[str]:
        """See `ModelConfig`. The layer after the last predicts a later token."""
        later = f"model.layers.{self.layers}."
        is_later = f"{later}eh_proj.weight" in stored
        return super().hf_unused(stored) | {name for name in stored if is_later and name.startswith(later)}
