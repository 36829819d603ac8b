"""Small models of all families, with windows and shared keys that short prompts exercise."""

from typing import Any

from mesh_transformer.families import FAMILIES

_SIZES = {"layers": 3, "d_model": 64, "n_heads": 8, "n_vocab": 512, "seq": 64}
_SHARED = {"n_kv_heads": 2, "d_head": 10, "d_ff": 96}
_EXPERTS = {"n_experts": 6, "experts_per_token": 2}
# the first layer has no experts
_LATENTS = {
    "kv_rank": 20,
    "nope_dims": 11,
    "rotary_dims": 6,
    "v_dims": 9,
    "d_ff": 96,
    "expert_d_ff": 40,
    "dense_layers": [0],
}
# the group `model` of a config, by name
MODELS: dict[str, dict[str, Any]] = {
    "gpt_neox": {"family": "gpt_neox", **_SIZES},
    "gpt2": {"family": "gpt2", **_SIZES},
    "gpt_neo": {"family": "gpt_neo", **_SIZES, "window": 7},
    "llama": {
        "family": "llama",
        **_SIZES,
        **_SHARED,
        "rotary_scaling": "llama3",
        "rotary_factor": 4.0,
        "rotary_low_freq_factor": 1.0,
        "rotary_high_freq_factor": 4.0,
        "rotary_original_seq": 16,
    },
    "mistral": {"family": "mistral", **_SIZES, **_SHARED, "window": 9},
    "qwen2": {"family": "qwen2", **_SIZES, **_SHARED, "window": 5, "full_layers": 1, "tied_head": True},
    "qwen3": {"family": "qwen3", **_SIZES, **_SHARED, "n_kv_heads": 4},
    "gemma": {"family": "gemma", **_SIZES, **_SHARED, "n_kv_heads": 1},
    "gemma2": {
        "family": "gemma2",
        **_SIZES,
        **_SHARED,
        "window": 6,
        "query_scale_dims": 30,
        "attention_softcap": 20.0,
        "softcap": 10.0,
    },
    "gemma3": {"family": "gemma3", **_SIZES, **_SHARED, "layers": 4, "window": 6, "full_every": 3, "softcap": 10.0},
    "olmo2": {"family": "olmo2", **_SIZES, **_SHARED},
    "olmo3": {
        "family": "olmo3",
        **_SIZES,
        **_SHARED,
        "layers": 4,
        "window": 7,
        "full_every": 2,
        "rotary_scaling": "yarn",
        "rotary_factor": 4.0,
        "rotary_original_seq": 16,
    },
    "smollm3": {"family": "smollm3", **_SIZES, **_SHARED, "layers": 4, "no_rotary_every": 3},
    "granite": {
        "family": "granite",
        **_SIZES,
        **_SHARED,
        "embed_scale": 3.0,
        "attention_scale": 0.2,
        "residual_scale": 0.4,
        "logit_divisor": 0.7,
    },
    "starcoder2": {"family": "starcoder2", **_SIZES, **_SHARED, "window": 9},
    "glm4": {"family": "glm4", **_SIZES, **_SHARED, "rotary_dims": 6},
    "seed_oss": {"family": "seed_oss", **_SIZES, **_SHARED, "attention_out_bias": True},
    "exaone4": {"family": "exaone4", **_SIZES, **_SHARED, "layers": 4, "window": 7, "full_every": 3},
    "cohere2": {"family": "cohere2", **_SIZES, "n_kv_heads": 2, "d_ff": 96, "layers": 4, "window": 7, "full_every": 3},
    "arcee": {"family": "arcee", **_SIZES, "n_kv_heads": 2, "d_ff": 96, "ff_bias": True},
    "hunyuan_v1_dense": {"family": "hunyuan_v1_dense", **_SIZES, **_SHARED, "attention_bias": True},
    "phi3": {"family": "phi3", **_SIZES, **_SHARED, "window": 9, "rotary_dims": 6},
    "codegen": {"family": "codegen", **_SIZES, "pe_rotary_dims": 4},
    "opt": {"family": "opt", **_SIZES},
    "bloom": {"family": "bloom", **_SIZES},
    "mixtral": {"family": "mixtral", **_SIZES, **_SHARED, **_EXPERTS, "window": 8},
    "olmoe": {"family": "olmoe", **_SIZES, **_EXPERTS, "d_ff": 48, "clip_qkv": 1.5},
    # layers with and without experts in turn
    "qwen2_moe": {
        "family": "qwen2_moe",
        **_SIZES,
        **_SHARED,
        **_EXPERTS,
        "layers": 4,
        "expert_d_ff": 40,
        "shared_d_ff": 56,
        "dense_layers": [0, 2],
    },
    # the first layer has none
    "qwen3_moe": {
        "family": "qwen3_moe",
        **_SIZES,
        **_SHARED,
        **_EXPERTS,
        "expert_d_ff": 40,
        "dense_layers": [0],
        "router_normalize": True,
    },
    "deepseek_v2": {
        "family": "deepseek_v2",
        **_SIZES,
        **_LATENTS,
        **_EXPERTS,
        "shared_d_ff": 56,
        "rotary_scaling": "yarn",
        "rotary_factor": 4.0,
        "rotary_original_seq": 16,
        "rotary_mscale": 0.7,
        "rotary_mscale_all_dims": 0.9,
    },
    "deepseek_v3": {
        "family": "deepseek_v3",
        **_SIZES,
        **_LATENTS,
        **_EXPERTS,
        "q_rank": 24,
        "router_scale": 1.3,
        "router_groups": 3,
        "router_top_groups": 2,
    },
    "glm4_moe": {
        "family": "glm4_moe",
        **_SIZES,
        **_SHARED,
        **_EXPERTS,
        "rotary_dims": 6,
        "expert_d_ff": 40,
        "dense_layers": [0],
        "qk_norm": True,
        "router_scale": 1.3,
        "router_groups": 3,
        "router_top_groups": 2,
    },
    "minimax_m2": {"family": "minimax_m2", **_SIZES, **_SHARED, **_EXPERTS, "d_ff": 48, "rotary_dims": 6},
    # two blocks, each of two layers and one with experts
    "jaxformer": {
        "family": "jaxformer",
        **_SIZES,
        **_EXPERTS,
        "layers": 6,
        "block_layers": 3,
        "latent_dim": 20,
        "rotary_dims": 6,
    },
}
# the families that transformers has too
OF_TRANSFORMERS = [name for name, family in FAMILIES.items() if family.HF_MODEL_TYPE is not None]
