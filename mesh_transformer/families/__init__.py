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
    llama,
    mistral,
    mixtral,
    olmoe,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
)
from mesh_transformer.families.base import ModelConfig

FAMILIES: dict[str, type[ModelConfig]] = {
    "gptj": gptj.Config,
    "gpt_neox": gpt_neox.Config,
    "gpt2": gpt2.Config,
    "gpt_neo": gpt_neo.Config,
    "llama": llama.Config,
    "mistral": mistral.Config,
    "qwen2": qwen2.Config,
    "qwen3": qwen3.Config,
    "gemma": gemma.Config,
    "gemma2": gemma2.Config,
    "mixtral": mixtral.Config,
    "olmoe": olmoe.Config,
    "qwen2_moe": qwen2_moe.Config,
    "qwen3_moe": qwen3_moe.Config,
    "deepseek_v2": deepseek_v2.Config,
    "deepseek_v3": deepseek_v3.Config,
}
