"""OLMo 2 (Walsh et al. 2025, arXiv:2501.00656): Llama with norms after each sublayer, and of whole q and k."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.llama import BiasedAttention
from mesh_transformer.fields import Positive
from mesh_transformer.spec import AttentionMixer, AttentionSpec, Layer, Mechanism, post


class Olmo2Like(BiasedAttention):
    """Llama with a norm after each sublayer instead of before it, and norms of q and k over all heads."""

    HF_END_OF_TEXT: ClassVar = 50279
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
    }

    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-5
    """epsilon that each norm adds to the mean square"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm(), qk_norm_at="whole")

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        return post(self.norm(), attention, ff)

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {"attention_post_norm": "post_attention_layernorm", "ff_post_norm": "post_feedforward_layernorm"}


class Olmo2Config(Olmo2Like):
    """OLMo 2: Llama with a norm after each sublayer instead of before it, and norms of q and k over all heads."""

    HF_MODEL_TYPE: ClassVar = "olmo2"
    HF_ARCHITECTURE: ClassVar = "Olmo2ForCausalLM"
    GGUF: ClassVar = Gguf("olmo2")

    family: Literal["olmo2"] = "olmo2"
    """model family: a file in mesh_transformer/families"""
