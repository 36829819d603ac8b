"""Granite 3 (Granite Team 2024): Llama with four fixed multipliers."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.llama import BiasedLlama
from mesh_transformer.fields import Derived, Positive
from mesh_transformer.spec import AttentionMixer, AttentionSpec, Decoder, Layer, Mechanism, sequential


class GraniteConfig(BiasedLlama):
    """Granite: Llama with multipliers of embeddings, attention, logits, and of what each sublayer adds."""

    HF_MODEL_TYPE: ClassVar = "granite"
    HF_ARCHITECTURE: ClassVar = "GraniteForCausalLM"
    GGUF: ClassVar = Gguf(
        "granite", rules=("permuted_heads",), required=("logit_scale",),
        fields={
            "attention.scale": "attention_scale", "embedding_scale": "embed_scale", "residual_scale": "residual_scale",
            "logit_scale": "logit_divisor",
        },
    )  # fmt: skip
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "attention_multiplier": 1.0,
    }

    family: Literal["granite"] = "granite"
    """model family: a file in mesh_transformer/families"""
    embed_scale: Annotated[Positive, Hf("embedding_multiplier")] = 1.0
    """the token embeddings are multiplied by this number"""
    attention_scale: Annotated[
        Positive, Derived("1 / sqrt(d_head)", of="d_head", rule=lambda dims: dims**-0.5), Hf("attention_multiplier")
    ] = 0.0
    """the products of queries and keys are multiplied by this number"""
    residual_scale: Annotated[Positive, Hf("residual_multiplier")] = 1.0
    """what attention and feed-forward add to the residual stream is multiplied by this number"""
    logit_divisor: Annotated[Positive, Hf("logits_scaling")] = 1.0
    """the logits are divided by this number"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), scale=self.attention_scale)

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        branches = sequential(self.norm(), attention, ff).branches
        return Layer(branches=tuple(replace(branch, scale=self.residual_scale) for branch in branches))

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), embed_scale=self.embed_scale, logit_scale=1 / self.logit_divisor)
