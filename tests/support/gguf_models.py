"""GGUF files of transformers' models, by the rules of llama.cpp's converter.

Compared by hand with the files of that converter (conversion/ in its repository): the same metadata of the model, and
the same tensors in every bit, for each of `VARIANTS`.
"""

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy

from support import gguf_files, hf_models

_LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}
# variants of hf_models, and what a file cannot say of them
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt_neox": {}, "gpt2": {"n_inner": None}, "llama2": {}, "llama3_tied": _LLAMA3, "llama_linear_biases": {},
    "llama_yarn": {}, "qwen2": {
        "use_sliding_window": False, "sliding_window": None, "layer_types": None, "rope_parameters": _YARN,
    },
    "qwen3": {}, "gemma": {}, "gemma2": {"query_pre_attn_scalar": 22},
    "gemma3": {"query_pre_attn_scalar": 22, "num_hidden_layers": 7, "layer_types": None}, "olmo2": {}, "olmo3": {},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4, "num_hidden_layers": 5, **_LLAMA3}, "granite": {},
    "starcoder2": {"sliding_window": None}, "seed_oss": {}, "exaone4": _LLAMA3,
    "cohere2": {"attention_bias": False, "layer_types": None, "num_hidden_layers": 5}, "arcee": {},
    "hunyuan_v1_dense": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "glm4": {}, "phi3": {},
    "phi3_longrope": {}, "bloom": {}, "mixtral": {"sliding_window": None}, "olmoe": {"clip_qkv": None},
    "qwen2_moe": {"mlp_only_layers": [], "decoder_sparse_step": 1}, "qwen3_moe": {"mlp_only_layers": []},
    "deepseek_v2": {"rope_parameters": {**_YARN, "mscale": 0.9, "mscale_all_dim": 0.9}}, "deepseek_v2_groups": {},
    "deepseek_v3": {}, "glm4_moe": {}, "minimax_m2": {},
}  # fmt: skip
ARCHITECTURES = {
    "gpt_neox": "gptneox", "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3", "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2", "hunyuan_v1_dense": "hunyuan-dense",
}  # fmt: skip
_PERMUTED = {"llama", "mixtral", "arcee", "granite", "smollm3"}
_KEYS = {
    "num_hidden_layers n_layer": "block_count", "max_position_embeddings n_positions seq_length": "context_length",
    "hidden_size n_embd": "embedding_length", "intermediate_size n_inner": "feed_forward_length",
    "num_attention_heads n_head": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps layer_norm_epsilon norm_epsilon": "attention.layer_norm_epsilon",
    "num_local_experts num_experts n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "n_group": "expert_group_count", "topk_group": "expert_group_used_count", "vocab_size": "vocab_size",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
    "q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank",
    "use_parallel_residual": "use_parallel_residual", "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip


def save(name: str, folder: Path) -> Path:
    """Save a random model of a variant to `folder`, and beside it the file. Returns the file's path."""
    family, keys = hf_models.VARIANTS[name]
    config = hf_models.save_model(family, {**keys, **VARIANTS[name]}, folder).config.to_dict()
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    if name == "mixtral":
        tensors = {key.replace("mlp.", "block_sparse_moe."): value for key, value in tensors.items()}
    architecture = ARCHITECTURES.get(config["model_type"], config["model_type"])
    stored, factors = _tensors(config, architecture, tensors), _factors(config)
    return gguf_files.write(
        folder.with_suffix(".gguf"), architecture, _metadata(config, tensors), {**stored, **factors}
    )


def _head_dim(config: dict[str, Any]) -> int:
    heads = config.get("num_attention_heads") or config["n_head"]
    return config.get("head_dim") or (config.get("hidden_size") or config["n_embd"]) // heads


def _metadata(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    kind, values = config["model_type"], {}
    for names, key in _KEYS.items():
        for name in names.split():
            if config.get(name) is not None:
                values[key] = config[name]
    values.setdefault("feed_forward_length", 4 * values["embedding_length"])
    rope = config.get("rope_parameters") or {}
    rope, local = rope.get("full_attention", rope), rope.get("sliding_attention", {})
    if config.get("head_dim") and kind != "granite":
        values |= {"attention.key_length": config["head_dim"], "attention.value_length": config["head_dim"]}
    if "rope_theta" in rope:
        values["rope.freq_base"] = rope["rope_theta"]
    if "rope_theta" in local:
        values["rope.freq_base_swa"] = local["rope_theta"]
    part = rope.get("partial_rotary_factor", 1.0)
    if "rope_theta" in rope and kind not in ("gemma", "gemma2", "gemma3_text"):
        values["rope.dimension_count"] = int(_head_dim(config) * part)
    values |= _scaling(rope, values["context_length"])
    if config.get("sliding_window") and kind in ("gemma2", "gemma3_text", "olmo3", "exaone4", "cohere2", "phi3"):
        values["attention.sliding_window"] = config["sliding_window"]
    if kind in ("olmo3", "exaone4") and config.get("sliding_window"):
        values["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in config["layer_types"]]
    if any(name.endswith("e_score_correction_bias") for name in tensors):
        values["expert_gating_func"] = 2
    if config.get("norm_topk_prob") is not None and kind in ("glm4_moe", "deepseek_v2", "deepseek_v3"):
        values["expert_weights_norm"] = config["norm_topk_prob"]
    if kind.startswith("deepseek"):
        nope, rotary, v = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
        values |= {
            "attention.head_count_kv": 1, "attention.key_length": config["kv_lora_rank"] + rotary,
            "attention.value_length": config["kv_lora_rank"], "attention.key_length_mla": nope + rotary,
            "attention.value_length_mla": v, "rope.dimension_count": rotary,
        }  # fmt: skip
    return {f"{{}}.{key}": value for key, value in values.items()}


def _scaling(rope: dict[str, Any], longest: int) -> dict[str, Any]:
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn", "longrope"):
        return {}
    values = {"rope.scaling.type": kind}
    if kind != "longrope":
        values["rope.scaling.factor"] = rope["factor"]
    if kind != "linear":
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if kind == "longrope":
        original = rope["original_max_position_embeddings"]
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(longest / original) / math.log(original))
    for name, key in {"attention_factor": "yarn_attn_factor", "beta_fast": "yarn_beta_fast",
                      "beta_slow": "yarn_beta_slow"}.items():  # fmt: skip
        if kind == "yarn" and rope.get(name) is not None:
            values[f"rope.scaling.{key}"] = rope[name]
    if kind == "yarn" and rope.get("mscale_all_dim") is not None:
        values["rope.scaling.yarn_log_multiplier"] = 0.1 * rope["mscale_all_dim"]
    return values


def _factors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    """The numbers for frequencies that stand in place of the constants of a rule."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{name}.weight": np.float32(rope[f"{name}_factor"]) for name in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    dims = _head_dim(config)
    wavelengths = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, dims, 2) / dims)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelengths - low) / (high - low)
    return {"rope_freqs.weight": np.float32(1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1)))}


def _tensors(config: dict[str, Any], architecture: str, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    kinds = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    layers = config.get("num_hidden_layers") or config["n_layer"]
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    made: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, values in tensors.items():
        if match := re.fullmatch(r"(.*experts)\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = values
            continue
        for part, changed in _changed(name, np.float32(values), config):
            made[_name(names, part)] = np.ascontiguousarray(changed)
    for name, by_number in experts.items():
        merged = name.replace("model.", "").replace("block_sparse_moe", "feed_forward")
        name = merged if "feed_forward" in merged else name
        made[_name(names, name)] = np.stack([np.float32(by_number[number]) for number in sorted(by_number)])
    return made


def _name(names: Any, name: str) -> str:
    name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    known = names.get_name(name, try_suffixes=(".weight", ".bias"))
    known = known or names.get_name(name.removeprefix("transformer."), try_suffixes=(".weight", ".bias"))
    assert known, name
    return str(known)


def _changed(name: str, values: np.ndarray, config: dict[str, Any]) -> list[tuple[str, np.ndarray]]:
    """The tensors that stand for one: rows permuted, one added, transposed or split."""
    kind = config["model_type"]
    heads = config.get("num_attention_heads") or config.get("n_head")
    if kind in _PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
        n = heads if match[1] == "q" else config["num_key_value_heads"]
        rest = values.shape[1:]
        return [(name, values.reshape(n, 2, -1, *rest).swapaxes(1, 2).reshape(values.shape))]
    if kind in ("gpt_neox", "bloom") and ".query_key_value." in name:
        return [(name, values.reshape(heads, 3, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape))]
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        return [(name, values + 1)]
    if kind == "gpt2" and ".h." in name and values.ndim == 2:
        return [(name, values.T)]
    if kind.startswith("deepseek") and name.endswith("kv_b_proj.weight"):
        nope, v = config["qk_nope_head_dim"], config["v_head_dim"]
        both = values.reshape(heads, nope + v, -1)
        return [
            (name.replace("kv_b_proj", "k_b_proj"), both[:, :nope].swapaxes(1, 2)),
            (name.replace("kv_b_proj", "v_b_proj"), both[:, nope:]),
        ]
    return [(name, values)]
