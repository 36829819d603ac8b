"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): many small experts, and norms of whole q and k."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.experts import WithExperts
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.fields import Positive, Switch
from mesh_transformer.spec import AttentionSpec, RouterSpec


class OlmoeConfig(WithExperts):
    """OLMoE: Llama with experts in every layer, and norms of q and k over all heads."""

    HF_MODEL_TYPE: ClassVar = "olmoe"
    HF_ARCHITECTURE: ClassVar = "OlmoeForCausalLM"
    GGUF: ClassVar = Gguf("olmoe", assumed={"router_normalize": False})
    HF_D_HEAD_FIXED: ClassVar = True
    HF_END_OF_TEXT: ClassVar = 50279
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "intermediate_size": 2048,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    }

    family: Literal["olmoe"] = "olmoe"
    """model family: a file in mesh_transformer/families"""
    router_normalize: Annotated[Switch, Hf("norm_topk_prob")] = False
    """the weights of a token's experts are divided by their sum"""
    attention_bias: Annotated[Switch, Hf("attention_bias")] = False
    """biases on q, k, v and the output of the attention"""
    clip_qkv: Annotated[Positive | None, Hf("clip_qkv")] = None
    """largest absolute value of q, k and v, which are cut there; absent: no limit"""

    def router(self) -> RouterSpec:
        """See `WithExperts`."""
        return replace(super().router(), normalize=self.router_normalize)

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(
            super().attention(),
            bias=self.attention_bias,
            out_bias=self.attention_bias,
            qk_norm=self.norm(),
            qk_norm_at="whole",
            clip=self.clip_qkv,
        )
