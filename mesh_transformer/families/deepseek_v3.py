"""DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437): DeepSeek-V2 with other routers."""

from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.deepseek_v2 import DeepSeekLike
from mesh_transformer.families.experts import SigmoidExperts
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, Only
from mesh_transformer.fields import Switch


class DeepSeekV3Config(DeepSeekLike, SigmoidExperts):
    """DeepSeek-V3: latent attention, and experts that are chosen by sigmoid and bias, after some dense layers."""

    HF_MODEL_TYPE: ClassVar = "deepseek_v3"
    HF_ARCHITECTURE: ClassVar = "DeepseekV3ForCausalLM"
    GGUF: ClassVar = Gguf(
        "deepseek2", needs="exp_probs_b.bias", gating=2, assumed={"router_normalize": False}, split_kv_b=True,
        names={"e_score_correction_bias": "e_score_correction.bias"},
    )  # fmt: skip
    HF_END_OF_TEXT: ClassVar = 1
    # transformers takes them for granted
    HF_FIXED: ClassVar = {
        **DeepSeekLike.HF_FIXED,
        "scoring_func": Only("sigmoid"),
        "topk_method": Only("noaux_tc"),
    }
    HF_WRITTEN: ClassVar = {**SigmoidExperts.HF_WRITTEN, "rope_interleave": True}
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
        "n_routed_experts": 256,
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
    router_normalize: Annotated[Switch, Hf("norm_topk_prob")] = True
    """the weights of a token's experts are divided by their sum"""
