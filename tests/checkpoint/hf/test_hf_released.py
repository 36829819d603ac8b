"""The keys of config.json of released models, as their authors wrote them."""

import re
from typing import Any

import pytest

from mesh_transformer.checkpoint.hf.config import parse_model
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError

WINDOW, FULL = "sliding_attention", "full_attention"
_ALL = {"architectures": ["x"], "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.57.0"}
_YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
# keys that transformers writes, and which change nothing in these models
UNUSED = {
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "original_max_position_embeddings",
    "_sliding_window_pattern",
    "no_rope_layer_interval",
}
# keys that are written in another form, for the same model
REWRITTEN = {
    "exaone-4.0-32b": {"sliding_window_pattern"},
    "hy-mt2-7b": {"rope_parameters"},
    "afm-4.5b": {"rope_parameters"},
}
# by name: the keys, and fields that the program reads from them. Those of exaone-4.0-1.2b, command-r7b, afm-4.5b and
# seed-oss-36b were written down from memory, without the hub
RELEASED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma-3-1b": (
        {
            "model_type": "gemma3_text",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_logit_softcapping": None,
            "cache_implementation": "hybrid",
            "eos_token_id": [1, 106],
            "final_logit_softcapping": None,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "max_position_embeddings": 32768,
            "num_attention_heads": 4,
            "num_hidden_layers": 26,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "vocab_size": 262144,
        },
        {"family": "gemma3", "full_every": 6, "rotary_base": 1e6, "local_rotary_base": 1e4, "tied_head": True},
    ),
    "olmo-2-7b": (
        {
            "model_type": "olmo2",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 500000,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
        {"family": "olmo2", "rotary_base": 5e5, "norm_eps": 1e-6},
    ),
    "olmo-3-7b": (
        {
            "model_type": "olmo3",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "layer_types": [WINDOW, WINDOW, WINDOW, FULL] * 8,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-06,
            "rope_scaling": _YARN,
            "rope_theta": 500000,
            "sliding_window": 4096,
            "tie_word_embeddings": False,
            "vocab_size": 100278,
        },
        {"family": "olmo3", "full_every": 4, "rotary_base": 5e5, "local_rotary_base": 5e5, "rotary_scaling": "yarn"},
    ),
    "smollm3-3b": (
        {
            "model_type": "smollm3",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "layer_types": [FULL] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "num_attention_heads": 16,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "pretraining_tp": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 128256,
        },
        {"family": "smollm3", "no_rotary_every": 4, "rotary_base": 5e6, "tied_head": True},
    ),
    "exaone-4.0-32b": (
        {
            "model_type": "exaone4",
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 361,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 27392,
            "layer_types": [WINDOW, WINDOW, WINDOW, FULL] * 16,
            "max_position_embeddings": 131072,
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
            "vocab_size": 102400,
        },
        {"family": "exaone4", "full_every": 4, "window": 4096, "rotary_scaling": "llama3", "rotary_base": 1e6},
    ),
    "exaone-4.0-1.2b": (
        {
            "model_type": "exaone4",
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 361,
            "head_dim": 64,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "layer_types": [FULL] * 30,
            "max_position_embeddings": 65536,
            "num_attention_heads": 32,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
            "rope_theta": 1000000,
            "sliding_window": None,
            "sliding_window_pattern": None,
            "tie_word_embeddings": True,
            "vocab_size": 102400,
        },
        {"family": "exaone4", "full_every": 1, "tied_head": True, "rotary_factor": 16.0},
    ),
    "hy-mt2-7b": (
        {
            "model_type": "hunyuan_v1_dense",
            "add_classification_head": False,
            "attention_bias": False,
            "attention_dropout": 0.1,
            "attention_head_dim": 128,
            "bos_token_id": 127958,
            "cla_share_factor": 2,
            "class_num": 0,
            "dense_list": [4096, 0],
            "eos_token_id": 127960,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "im_end_id": 5,
            "im_newline_id": 11,
            "im_start_id": 4,
            "intermediate_size": 14336,
            "mask_init_id": 12,
            "max_position_embeddings": 262144,
            "mlp_bias": False,
            "norm_type": "rms",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "org_vocab_size": 128167,
            "pad_id": 127961,
            "pad_token_id": 127961,
            "pool_type": "last",
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "type": "dynamic",
            },
            "rope_theta": 10000.0,
            "sep_token_id": 127962,
            "text_end_id": 7,
            "text_start_id": 6,
            "tie_word_embeddings": True,
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
            "vocab_size": 128167,
        },
        {"family": "hunyuan_v1_dense", "rotary_base": 1e4 * 1000 ** (128 / 126), "rotary_scaling": "none"},
    ),
    "command-r7b": (
        {
            "model_type": "cohere2",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 5,
            "cache_implementation": "hybrid",
            "eos_token_id": 255001,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "layer_norm_eps": 1e-05,
            "layer_switch": 4,
            "logit_scale": 0.25,
            "max_position_embeddings": 8192,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "order_of_interleaved_layers": "local_attn_first",
            "pad_token_id": 0,
            "position_embedding_type": "rope_gptj",
            "rope_scaling": None,
            "rope_theta": 50000,
            "rotary_pct": 1.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": True,
            "vocab_size": 256000,
        },
        {"family": "cohere2", "full_every": 4, "window": 4096, "logit_scale": 0.25, "rotary_base": 5e4},
    ),
    "afm-4.5b": (
        {
            "model_type": "arcee",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 128000,
            "eos_token_id": 128001,
            "head_dim": 128,
            "hidden_act": "relu2",
            "hidden_size": 2560,
            "intermediate_size": 18432,
            "max_position_embeddings": 65536,
            "mlp_bias": False,
            "num_attention_heads": 20,
            "num_hidden_layers": 36,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 20.0,
                "mscale": 1.0,
                "original_max_position_embeddings": 4096,
                "rope_type": "yarn",
                "type": "yarn",
            },
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 128004,
        },
        {"family": "arcee", "rotary_scaling": "yarn", "rotary_factor": 20.0, "rotary_original_seq": 4096},
    ),
    "seed-oss-36b": (
        {
            "model_type": "seed_oss",
            "attention_bias": True,
            "attention_dropout": 0.1,
            "attention_out_bias": False,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "max_position_embeddings": 524288,
            "mlp_bias": False,
            "num_attention_heads": 80,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "pad_token_id": 1,
            "residual_dropout": 0.1,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 10000000.0,
            "tie_word_embeddings": False,
            "vocab_size": 155136,
        },
        {"family": "seed_oss", "rotary_base": 1e7, "n_kv_heads": 8},
    ),
    "granite-3.3-2b": (
        {
            "model_type": "granite",
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "logits_scaling": 8,
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000000.0,
            "tie_word_embeddings": True,
            "vocab_size": 49159,
        },
        {"family": "granite", "embed_scale": 12.0, "attention_scale": 0.015625, "logit_divisor": 8.0},
    ),
    "starcoder2-3b": (
        {
            "model_type": "starcoder2",
            "attention_softmax_in_fp32": True,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "layer_norm_epsilon": 1e-05,
            "max_position_embeddings": 16384,
            "mlp_type": "default",
            "norm_epsilon": 1e-05,
            "norm_type": "layer_norm",
            "num_attention_heads": 24,
            "num_hidden_layers": 30,
            "num_key_value_heads": 2,
            "residual_dropout": 0.1,
            "rope_theta": 999999.4420358813,
            "scale_attn_weights": True,
            "sliding_window": 4096,
            "use_bias": True,
            "vocab_size": 49152,
        },
        {"family": "starcoder2", "window": 4096, "bias": True, "tied_head": True},
    ),
    "glm-4-9b-0414": (
        {
            "model_type": "glm4",
            "attention_bias": True,
            "eos_token_id": [151329, 151336, 151338],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 13696,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "vocab_size": 151552,
        },
        {"family": "glm4", "rotary_dims": 64, "attention_bias": True},
    ),
    "glm-4.5-air": (
        {
            "model_type": "glm4_moe",
            "attention_bias": True,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "max_position_embeddings": 131072,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 46,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_qk_norm": False,
            "vocab_size": 151552,
        },
        {"family": "glm4_moe", "rotary_dims": 64, "dense_layers": (0,), "n_experts": 128, "shared_d_ff": 1408},
    ),
    "phi-4": (
        {
            "model_type": "phi3",
            "attention_bias": False,
            "auto_map": {},
            "embd_pdrop": 0.0,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "max_position_embeddings": 16384,
            "num_attention_heads": 40,
            "num_hidden_layers": 40,
            "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384,
            "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 250000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 100352,
        },
        {"family": "phi3", "rotary_base": 2.5e5, "rotary_dims": 128, "window": None},
    ),
    "minimax-m2": (
        # without its quantization
        {
            "model_type": "minimax_m2",
            "attn_type_list": [1] * 62,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "max_position_embeddings": 196608,
            "mlp_intermediate_size": 8192,
            "mtp_transformer_layers": 1,
            "num_attention_heads": 48,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 62,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "num_mtp_modules": 3,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "rotary_dim": 64,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid",
            "sliding_window": None,
            "swa_rope_theta": -1.0,
            "tie_word_embeddings": False,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
            "vocab_size": 200064,
        },
        {"family": "minimax_m2", "rotary_dims": 64, "n_experts": 256},
    ),
    "codegen-350m": (
        {
            "model_type": "codegen",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "gradient_checkpointing": False,
            "layer_norm_epsilon": 1e-05,
            "n_ctx": 2048,
            "n_embd": 1024,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 20,
            "n_positions": 2048,
            "resid_pdrop": 0.0,
            "rotary_dim": 32,
            "scale_attn_weights": True,
            "summary_activation": None,
            "summary_type": "cls_index",
            "tie_word_embeddings": False,
            "tokenizer_class": "GPT2Tokenizer",
            "vocab_size": 51200,
        },
        {"family": "codegen", "pe_rotary_dims": 32, "d_ff": 4096},
    ),
    "bloom-560m": (
        {
            "model_type": "bloom",
            "apply_residual_connection_post_layernorm": False,
            "attention_softmax_in_fp32": True,
            "bias_dropout_fusion": True,
            "hidden_dropout": 0.0,
            "hidden_size": 1024,
            "layer_norm_epsilon": 1e-05,
            "masked_softmax_fusion": True,
            "n_head": 16,
            "n_inner": None,
            "n_layer": 24,
            "offset_alibi": 100,
            "pretraining_tp": 1,
            "seq_length": 2048,
            "skip_bias_add": True,
            "skip_bias_add_qkv": False,
            "unk_token_id": 0,
            "vocab_size": 250880,
        },
        {"family": "bloom", "seq": 2048, "n_heads": 16, "d_ff": 4096},
    ),
    "opt-125m": (
        {
            "model_type": "opt",
            "_remove_final_layer_norm": False,
            "activation_dropout": 0.0,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "dropout": 0.1,
            "ffn_dim": 3072,
            "hidden_size": 768,
            "init_std": 0.02,
            "layerdrop": 0.0,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "prefix": "</s>",
            "vocab_size": 50272,
            "word_embed_proj_dim": 768,
        },
        {"family": "opt", "activation": "relu", "d_ff": 3072, "tied_head": True},
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_is_read(name) -> None:
    keys, fields = RELEASED[name]
    model = parse_model({**_ALL, **keys}, "config.json")
    assert {field: getattr(model, field) for field in fields} == fields
    assert parse_model({"model_type": model.HF_MODEL_TYPE, **model.to_hf()}, "config.json") == model


def test_internlm3_as_its_authors_wrote_it() -> None:
    """Within max_position_embeddings the dynamic scaling of transformers changes nothing."""
    keys = {
        "model_type": "internlm3", "attention_dropout": 0.0, "auto_map": {"AutoConfig": "code.InternLM3Config"},
        "bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "qkv_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        "rope_theta": 50000000, "tie_word_embeddings": False, "vocab_size": 128512,
    }  # fmt: skip
    model = parse_model({**_ALL, **keys}, "config.json")
    fields = {"family": "llama", "seq": 32768, "n_kv_heads": 2, "rotary_scaling": "none", "rotary_base": 5e7}
    assert {field: getattr(model, field) for field in fields} == fields
    with pytest.raises(UserError, match="'auto_map'"):
        parse_model({**_ALL, **keys, "model_type": "llama"}, "config.json")


@pytest.mark.parametrize(
    ("key", "value", "refused"),
    [
        # each key has an effect in MiniMax's other models: a factor, a shared expert, layers with a window
        ("layernorm_full_attention_beta", 0.75, "layernorm_full_attention_beta is 0.75: only 1.0 is supported"),
        ("layernorm_linear_attention_beta", 2, "layernorm_linear_attention_beta is 2: only 1.0 is supported"),
        ("layernorm_mlp_beta", 0.5, "layernorm_mlp_beta is 0.5: only 1.0 is supported"),
        ("layernorm_mlp_alpha", 3.5, "'layernorm_mlp_alpha' is 3.5: this key is unknown"),
        ("shared_intermediate_size", 8192, "shared_intermediate_size is 8192: only 0 is supported"),
        ("sliding_window", 4096, "'sliding_window' is 4096: this key is unknown"),
        ("attn_type_list", [0] * 62, "only 1 (full attention) in each layer is supported"),
    ],
)
def test_minimax_m2_without_what_gives_its_unused_keys_an_effect(key, value, refused) -> None:
    keys, _ = RELEASED["minimax-m2"]
    with pytest.raises(UserError, match=re.escape(refused)):
        parse_model({**_ALL, **keys, key: value}, "config.json")


@pytest.mark.parametrize("name", RELEASED)
def test_transformers_reads_what_is_written(name) -> None:
    """Its config has the values of the original keys that it knows."""
    import transformers

    keys, _ = RELEASED[name]
    model = parse_model({**_ALL, **keys}, "config.json")
    known = transformers.AutoConfig.for_model(keys["model_type"]).to_dict().keys() - UNUSED - REWRITTEN.get(name, set())
    original, ours = (
        transformers.AutoConfig.for_model(**one).to_dict()
        for one in (keys, {"model_type": model.HF_MODEL_TYPE, **model.to_hf()})
    )
    compared = [key for key in known if not key.endswith(("_token_id", "dropout"))]
    assert {key: ours[key] for key in compared} == {key: original[key] for key in compared}


@pytest.mark.parametrize("name", RELEASED)
def test_the_parameters_are_counted(name) -> None:
    """As many as transformers makes. The estimates of preflight are sums over the same arrays."""
    import torch
    import transformers

    keys, _ = RELEASED[name]
    model = parse_model({**_ALL, **keys}, "config.json")
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**keys))
    buffers = [buffer for key, buffer in theirs.named_buffers() if key.endswith("correction_bias")]
    expected = sum(one.numel() for one in [*theirs.parameters(), *buffers])
    whole = parse_config({"model": {**model.model_dump(exclude_none=True), "vocab_multiple": 1}}).model.decoder()
    found = sum(array.size for array in whole.arrays().values())
    # biases that only our GPT-J has: of the embedding
    assert found - expected == (model.d_model if name == "codegen-350m" else 0)
