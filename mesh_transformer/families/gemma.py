"""Gemma (Gemma Team 2024, arXiv:2403.08295): Llama with scaled embeddings and norms around 1."""

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, Only
from mesh_transformer.families.llama import BiasedAttention
from mesh_transformer.fields import Switch
from mesh_transformer.spec import Activation, Decoder, NormSpec


class GemmaLike(BiasedAttention):
    """Llama with scaled and tied embeddings, norms whose scale is 1 + w, and a tanh gelu."""

    ACTIVATION: ClassVar[Activation] = "gelu_tanh"
    HF_END_OF_TEXT: ClassVar = 1
    # the memory of transformers' cache
    HF_IGNORED: ClassVar[tuple[str, ...]] = ("cache_implementation",)

    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = True
    """the head uses the token embeddings as its weights"""

    def norm(self) -> NormSpec:
        """See `LlamaLike`."""
        return replace(super().norm(), plus_one=True)

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), embed_scale=math.sqrt(self.d_model))


class GemmaConfig(GemmaLike):
    """Gemma: Llama with scaled and tied embeddings, norms whose scale is 1 + w, and a tanh gelu."""

    HF_MODEL_TYPE: ClassVar = "gemma"
    HF_ARCHITECTURE: ClassVar = "GemmaForCausalLM"
    GGUF: ClassVar = Gguf("gemma", rules=("norm_plus_one",))
    # transformers takes gelu for its tanh form here, as the first files say gelu
    HF_FIXED: ClassVar = {"hidden_act": Only("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")}
    # an older name of hidden_act, which transformers 5 ignores
    HF_IGNORED: ClassVar = (*GemmaLike.HF_IGNORED, "hidden_activation")
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 28,
        "hidden_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "intermediate_size": 24576,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
    }

    family: Literal["gemma"] = "gemma"
    """model family: a file in mesh_transformer/families"""
