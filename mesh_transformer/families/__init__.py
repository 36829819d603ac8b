"""Model families as data. A family is one file in this folder and one line here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mesh_transformer.families import (
    arcee,
    bloom,
    codegen,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    granite,
    hunyuan_v1_dense,
    jaxformer,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo2,
    olmo3,
    olmoe,
    opt,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    seed_oss,
    smollm3,
    starcoder2,
)
from mesh_transformer.families.base import ModelConfig

FAMILIES: dict[str, type[ModelConfig]] = {
    "gptj": gptj.GptJConfig,
    "gpt_neox": gpt_neox.GptNeoXConfig,
    "gpt2": gpt2.Gpt2Config,
    "gpt_neo": gpt_neo.GptNeoConfig,
    "llama": llama.LlamaConfig,
    "mistral": mistral.MistralConfig,
    "qwen2": qwen2.Qwen2Config,
    "qwen3": qwen3.Qwen3Config,
    "gemma": gemma.GemmaConfig,
    "gemma2": gemma2.Gemma2Config,
    "gemma3": gemma3.Gemma3Config,
    "olmo2": olmo2.Olmo2Config,
    "olmo3": olmo3.Olmo3Config,
    "smollm3": smollm3.SmolLM3Config,
    "granite": granite.GraniteConfig,
    "starcoder2": starcoder2.Starcoder2Config,
    "glm4": glm4.Glm4Config,
    "seed_oss": seed_oss.SeedOssConfig,
    "exaone4": exaone4.Exaone4Config,
    "cohere2": cohere2.Cohere2Config,
    "arcee": arcee.ArceeConfig,
    "hunyuan_v1_dense": hunyuan_v1_dense.HunyuanDenseConfig,
    "phi3": phi3.Phi3Config,
    "codegen": codegen.CodeGenConfig,
    "opt": opt.OptConfig,
    "bloom": bloom.BloomConfig,
    "mixtral": mixtral.MixtralConfig,
    "olmoe": olmoe.OlmoeConfig,
    "qwen2_moe": qwen2_moe.Qwen2MoeConfig,
    "qwen3_moe": qwen3_moe.Qwen3MoeConfig,
    "deepseek_v2": deepseek_v2.DeepSeekV2Config,
    "deepseek_v3": deepseek_v3.DeepSeekV3Config,
    "glm4_moe": glm4_moe.Glm4MoeConfig,
    "minimax_m2": minimax_m2.MiniMaxM2Config,
    "jaxformer": jaxformer.JaxformerConfig,
}


class Alias(NamedTuple):
    """Another `model_type` in config.json for the models of a family.

    Args:
        family: the `model_type` of the family.
        keys: other names that its keys have there.
        defaults: of keys that such a config.json leaves out, where they are not those of the family.
        ignored: keys that change nothing, such as the program on the hub that computes what the family does.
    """

    family: str
    keys: Mapping[str, str] = {}
    defaults: Mapping[str, Any] = {}
    ignored: tuple[str, ...] = ()


ALIASES: dict[str, Alias] = {
    "gpt-sw3": Alias("gpt2"),
    "internlm3": Alias(
        "llama",
        {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        {
            "num_hidden_layers": 48, "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 10240,
            "vocab_size": 128512, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        },
        ("auto_map",),
    ),
    "kimi_k2": Alias("deepseek_v3"),
    "ministral": Alias("mistral"),
}  # fmt: skip
