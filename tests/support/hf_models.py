"""Random transformers models of every family, small and of odd sizes, and what they answer."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# tests/conftest.py draws it anew in each run and prints it; the same number gives the same weights and prompts
SEED = int(os.environ["TESTS_SEED"])
VOCAB, SEQ, PROMPT, NEW = 307, 160, 61, 8
# the distance from the likeliest token to the next one, in a greedy completion: above any difference of two programs
LEAST_MARGIN = 2e-3
# of embeddings, above any rounding error; of logits, when a token goes to another expert
CHANGE, LEAST_JUMP = 3e-6, 2e-3
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 84,
    "intermediate_size": 118,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": SEQ,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_FULL, _WINDOW = "full_attention", "sliding_attention"
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40}


def rope(kind: str = "default", theta: float = 1e4, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


def by_type(full: dict[str, Any], window: dict[str, Any]) -> dict[str, Any]:
    """The rotary encoding of layers without a window, and of layers with one."""
    return {"rope_parameters": {_FULL: full["rope_parameters"], _WINDOW: window["rope_parameters"]}}


_LLAMA3 = rope(
    "llama3", 5e4, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=40
)
_GPT2 = {"vocab_size": VOCAB, "n_positions": SEQ, "n_embd": 84, "n_layer": 3, "n_head": 6, "n_inner": 118}
_GPT_NEO = {
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ,
    "hidden_size": 84,
    "num_layers": 4,
    "num_heads": 6,
    "intermediate_size": 118,
    "window_size": 7,
}
_EXPERTS = {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 46}
_LATENTS = {
    "q_lora_rank": 26,
    "kv_lora_rank": 34,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 10,
    "v_head_dim": 9,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 46,
    "n_shared_experts": 2,
}
_GROUPS = {"n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.3}
# by name: the family of transformers, and the keys of its config
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # 0.45 x 14 dims is 6.3: 6 are rotated
    "gpt_neox": ("GPTNeoX", {**BASE, **rope(partial_rotary_factor=0.45)}),
    "gpt_neox_sequential": (
        "GPTNeoX",
        {
            **BASE,
            **rope(theta=500.0, partial_rotary_factor=1.0),
            "use_parallel_residual": False,
            "hidden_act": "gelu_fast",
            "layer_norm_eps": 1e-3,
        },
    ),
    "gpt_neox_tied": (
        "GPTNeoX",
        # 0.66 x 14 dims is 9.2: with 9 dims, 10 are rotated
        {**BASE, **rope(partial_rotary_factor=0.66), "attention_bias": False, "tie_word_embeddings": True},
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2_untied": ("GPT2", {**_GPT2, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "gpt_neo": ("GPTNeo", {**_GPT_NEO, "attention_types": [[["global", "local"], 2]]}),
    "gptj": ("GPTJ", {**_GPT2, "rotary_dim": 10}),
    "llama2": ("Llama", {**BASE, **rope()}),
    "llama3_tied": (
        "Llama",
        {**BASE, **_LLAMA3, "num_key_value_heads": 2, "head_dim": 22, "tie_word_embeddings": True},
    ),
    "llama_linear_biases": (
        "Llama",
        {
            **BASE,
            **rope("linear", factor=2.5),
            "num_key_value_heads": 3,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama_yarn": ("Llama", {**BASE, "rope_parameters": _YARN, "num_key_value_heads": 2}),
    "mistral": ("Mistral", {**BASE, **rope(), "num_key_value_heads": 2, "head_dim": 14, "sliding_window": 7}),
    "qwen2": (
        "Qwen2",
        {
            **BASE,
            "rope_parameters": {**_YARN, "truncate": False, "mscale": 0.7, "mscale_all_dim": 0.9},
            "num_key_value_heads": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("Qwen3", {**BASE, **rope(theta=1e6), "num_key_value_heads": 2, "head_dim": 18}),
    "gemma": ("Gemma", {**BASE, **rope(), "num_key_value_heads": 1, "head_dim": 22}),
    "gemma2": (
        "Gemma2",
        {
            **BASE,
            **rope(),
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "head_dim": 22,
            "sliding_window": 6,
            "query_pre_attn_scalar": 30,
        },
    ),
    # windows in all layers but the third, which has a scaled encoding of another base
    "gemma3": (
        "Gemma3",
        {
            **BASE,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "head_dim": 22,
            "sliding_window": 6,
            "layer_types": [_WINDOW, _WINDOW, _FULL, _WINDOW, _WINDOW],
            "query_pre_attn_scalar": 30,
            "final_logit_softcapping": 10.0,
            **by_type(rope("linear", 5e3, factor=2.5), rope(theta=300.0)),
        },
    ),
    "olmo2": ("Olmo2", {**BASE, **rope(), "num_key_value_heads": 2}),
    "olmo3": (
        "Olmo3",
        {
            **BASE,
            "num_hidden_layers": 4,
            "num_key_value_heads": 3,
            "sliding_window": 7,
            "layer_types": [_FULL, _WINDOW, _WINDOW, _FULL],
            "attention_bias": True,
            **by_type({"rope_parameters": {**_YARN, "attention_factor": 1.2}}, rope(theta=2e3)),
        },
    ),
    "smollm3": (
        "SmolLM3",
        {
            **BASE,
            **_LLAMA3,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "no_rope_layers": [1, 0, 1, 1, 0],
            "mlp_bias": True,
        },
    ),
    "granite": (
        "Granite",
        {
            **BASE,
            **rope(),
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 0.7,
        },
    ),
    "starcoder2": ("Starcoder2", {**BASE, **rope(theta=1e5), "num_key_value_heads": 2, "sliding_window": 9}),
    "seed_oss": (
        "SeedOss",
        {
            **BASE,
            **rope(theta=1e5),
            "num_key_value_heads": 2,
            "head_dim": 18,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
    ),
    "exaone4": (
        "Exaone4",
        {
            **BASE,
            **_LLAMA3,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
        },
    ),
    "cohere2": (
        "Cohere2",
        {
            **BASE,
            **rope(),
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "sliding_window": 7,
            "logit_scale": 0.7,
            "layer_types": [_WINDOW, _FULL, _WINDOW, _WINDOW, _FULL],
            "attention_bias": True,
        },
    ),
    "arcee": (
        "Arcee",
        {**BASE, **rope(), "num_key_value_heads": 2, "mlp_bias": True, "attention_bias": True},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {**BASE, **_LLAMA3, "num_key_value_heads": 2, "head_dim": 18}),
    "hunyuan_v1_dense_alpha": (
        "HunYuanDenseV1",
        {
            **BASE,
            **rope("dynamic", alpha=5.0, factor=1.0),
            "num_key_value_heads": 3,
            "head_dim": 14,
            "attention_bias": True,
        },
    ),
    # 0.45 x 18 dims is 8.1: 8 are rotated
    "glm4": (
        "Glm4",
        {**BASE, **rope(partial_rotary_factor=0.45), "eos_token_id": [0], "num_key_value_heads": 2, "head_dim": 18},
    ),
    "phi3": (
        "Phi3",
        {**BASE, **rope(partial_rotary_factor=0.75), "num_key_value_heads": 2, "sliding_window": 9},
    ),
    "phi3_longrope": (
        "Phi3",
        {
            **BASE,
            **rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.2, 1.3, 1.4],
                long_factor=[1.5, 2.5, 3.5, 5.0, 7.0],
                partial_rotary_factor=0.75,
            ),
            # prompts are longer
            "original_max_position_embeddings": 40,
            "num_key_value_heads": 3,
        },
    ),
    "codegen": ("CodeGen", {**_GPT2, "rotary_dim": 10}),
    "opt": (
        "OPT",
        {
            "vocab_size": VOCAB,
            "max_position_embeddings": SEQ,
            "hidden_size": 84,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "ffn_dim": 118,
        },
    ),
    # 6 heads have the slopes of 4 and two of 8
    "bloom": ("Bloom", {"vocab_size": VOCAB, "hidden_size": 84, "n_layer": 3, "n_head": 6, "seq_length": SEQ}),
    "mixtral": (
        "Mixtral",
        {
            **BASE,
            **rope(theta=1e6),
            "num_key_value_heads": 2,
            "sliding_window": 9,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "olmoe": (
        "Olmoe",
        {**BASE, **rope(), "num_key_value_heads": 3, "num_experts": 10, "num_experts_per_tok": 3, "clip_qkv": 1.5},
    ),
    # layers 0 and 2 are dense
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **BASE,
            **rope(),
            **_EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 58,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {**BASE, **rope(), **_EXPERTS, "head_dim": 18, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **BASE,
            **_LATENTS,
            "q_lora_rank": None,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
            "rms_norm_eps": 1e-4,
        },
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {**BASE, **_LATENTS, **_GROUPS, **rope(), "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **BASE,
            **_LATENTS,
            **_GROUPS,
            "num_key_value_heads": 6,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            **BASE,
            **_GROUPS,
            **rope(partial_rotary_factor=0.5),
            **{key: value for key, value in _LATENTS.items() if "lora" not in key and "head_dim" not in key},
            "num_key_value_heads": 2,
            "head_dim": 20,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            **BASE,
            **rope(partial_rotary_factor=0.5),
            "num_key_value_heads": 2,
            "head_dim": 20,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
}


# the variants with routed experts
EXPERTS = [name for name, (_, keys) in VARIANTS.items() if "num_experts_per_tok" in keys]


class Theirs(NamedTuple):
    """A folder of transformers, and what its model answers.

    Args:
        prompt: int64 (2, PROMPT), longer than every window and original context.
        logits: float32 (2, PROMPT, VOCAB).
        tokens: int64 (2, NEW), the greedy tokens after the prompt.
    """

    folder: Path
    prompt: np.ndarray
    logits: np.ndarray
    tokens: np.ndarray


def save(name: str, folder: Path) -> Any:
    """Save a random model of a variant to `folder`."""
    return save_model(*VARIANTS[name], folder)


def save_model(family: str, keys: dict[str, Any], folder: Path) -> Any:
    """Save a random model of a family of transformers to `folder`.

    Noise moves all weights away from their start: norms are not 1 and biases not 0, so that one left out would show.
    """
    import torch
    import transformers

    torch.manual_seed(SEED)
    kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    model = kind(kind.config_class(**keys, attn_implementation="eager")).eval()
    # the default implementation of experts refuses matrices of odd widths
    model.set_experts_implementation("eager")
    with torch.no_grad():
        # of the buffers, a file holds the biases of routers
        biases = [buffer for buffer_name, buffer in model.named_buffers() if buffer_name.endswith("correction_bias")]
        for parameter in [*model.parameters(), *biases]:
            parameter.add_(0.06 * torch.randn(parameter.shape))
    model.save_pretrained(folder)
    return model


def make(name: str, folder: Path) -> Theirs:
    """Save a random model of a variant to `folder`, and let it answer a prompt."""
    import torch

    model, random = save(name, folder), np.random.default_rng(SEED)
    with torch.no_grad():
        while True:
            prompt = random.integers(1, VOCAB, (2, PROMPT))
            answer = model.generate(
                torch.tensor(prompt),
                max_new_tokens=NEW,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_logits=True,
            )
            first, second = torch.stack(answer.logits).topk(2).values.unbind(-1)
            clear = (first - second).min() > LEAST_MARGIN
            if clear and (name not in EXPERTS or chooses_clearly(model, answer.sequences)):
                logits = model(torch.tensor(prompt)).logits.numpy()
                return Theirs(folder, prompt, logits, answer.sequences[:, PROMPT:].numpy())


def chooses_clearly(model: Any, tokens: Any) -> bool:
    """Whether no router chooses between nearly equal scores, where two programs may choose different experts: a small
    change of the embeddings, and its opposite, change the logits little."""
    import torch

    embeddings, logits = model.get_input_embeddings()(tokens), model(tokens).logits
    generator = torch.Generator().manual_seed(SEED)
    changes = [CHANGE * torch.randn(embeddings.shape, generator=generator) for _ in range(2)]
    moved = [model(inputs_embeds=embeddings + sign * change).logits for change in changes for sign in (-1, 1)]
    return max(float((one - logits).abs().max()) for one in moved) < LEAST_JUMP
