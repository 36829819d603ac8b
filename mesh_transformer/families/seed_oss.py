"""Seed-OSS (ByteDance Seed 2025): Llama with biases on q, k and v, and perhaps on the output of the attention."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.llama import BiasedLlama
from mesh_transformer.fields import Switch
from mesh_transformer.spec import AttentionSpec


class SeedOssConfig(BiasedLlama):
    """Seed-OSS: Llama with biases on q, k and v, and perhaps on the output of the attention."""

    HF_MODEL_TYPE: ClassVar = "seed_oss"
    HF_ARCHITECTURE: ClassVar = "SeedOssForCausalLM"
    GGUF: ClassVar = Gguf("seed_oss")
    # transformers ignores it
    HF_IGNORED: ClassVar = ("pretraining_tp",)
    HF_WRITTEN: ClassVar = {**BiasedLlama.HF_WRITTEN, "residual_dropout": 0.0}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 64,
        "hidden_size": 4096,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 27648,
        "vocab_size": 155136,
        "max_position_embeddings": 524288,
    }

    family: Literal["seed_oss"] = "seed_oss"
    """model family: a file in mesh_transformer/families"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = True
    """biases on q, k and v"""
    attention_out_bias: Annotated[Switch, Hf("attention_out_bias")] = False
    """a bias on the output of the attention"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), out_bias=self.attention_out_bias)
