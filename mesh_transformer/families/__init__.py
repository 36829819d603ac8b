"""Model families as data. A family is one file in this folder and one line here."""

from mesh_transformer.families import (
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    jaxformer,
    llama,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
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
    "olmo2": olmo2.Olmo2Config,
    "mixtral": mixtral.MixtralConfig,
    "olmoe": olmoe.OlmoeConfig,
    "qwen2_moe": qwen2_moe.Qwen2MoeConfig,
    "qwen3_moe": qwen3_moe.Qwen3MoeConfig,
    "deepseek_v2": deepseek_v2.DeepSeekV2Config,
    "deepseek_v3": deepseek_v3.DeepSeekV3Config,
    "jaxformer": jaxformer.JaxformerConfig,
}
