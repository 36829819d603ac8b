"""Command R7B and Command A (Cohere 2024, arXiv:2504.00698): attention and feed-forward side by side after one layer
norm; layers without a window have no rotary encoding."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, Only
from mesh_transformer.families.layer_types import SLIDING, WithLayerTypes
from mesh_transformer.families.llama import BiasedAttention
from mesh_transformer.fields import Count, Derived, Positive, Switch, Unit
from mesh_transformer.spec import AttentionMixer, Decoder, Layer, Mechanism, NormSpec, Rotary, parallel


class Cohere2Config(BiasedAttention, WithLayerTypes):
    """Command R7B: attention and feed-forward side by side after one layer norm, with windows and rotated pairs in
    three of four layers and neither in the others, and logits that are multiplied by a number."""

    HF_MODEL_TYPE: ClassVar = "cohere2"
    HF_ARCHITECTURE: ClassVar = "Cohere2ForCausalLM"
    GGUF: ClassVar = Gguf(
        "cohere2",
        fields={"logit_scale": "logit_scale"},
        required=("logit_scale", "attention.sliding_window"),
    )
    HF_END_OF_TEXT: ClassVar = 255001
    FULL_EVERY: ClassVar = 4
    HF_ROWS: ClassVar = {**BiasedAttention.HF_ROWS, "norm_eps": Hf("layer_norm_eps")}
    HF_FIXED: ClassVar = {
        **BiasedAttention.HF_FIXED,
        "use_gated_activation": Only(True, written=False),
        "use_parallel_block": Only(True, written=False),
        "use_qk_norm": Only(False, written=False),
    }
    # transformers ignores them
    HF_IGNORED: ClassVar = (
        *("cache_implementation", "layer_switch", "use_embedding_sharing", "use_parallel_embedding"),
        *("pretraining_tp", "rotary_pct", "position_embedding_type", "order_of_interleaved_layers"),
    )
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 40,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "intermediate_size": 22528,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    }

    family: Literal["cohere2"] = "cohere2"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Positive = 1e-5
    """epsilon that each norm adds to the variance"""
    tied_head: Annotated[Switch, Hf("tie_word_embeddings")] = True
    """the head uses the token embeddings as its weights"""
    logit_scale: Annotated[Positive, Hf("logit_scale")] = 0.0625
    """the logits are multiplied by this number"""
    full_every: Annotated[Count | None, Unit("layers"), Derived("4, without layer_types")] = None
    """the last of each full_every layers has no window and no rotary encoding, and the others have both"""

    def norm(self) -> NormSpec:
        """See `LlamaLike`."""
        return NormSpec(kind="layer", eps=self.norm_eps, offset=False)

    def rotary(self) -> Rotary:
        """See `RotaryConfig`."""
        return replace(super().rotary(), style="pairs")

    def rotaries(self) -> list[Rotary]:
        """See `LlamaLike`."""
        rotary = self.rotary()
        absent = replace(rotary, base=None, scaling=None)
        return [rotary if kind == SLIDING and self.window is not None else absent for kind in self.types()]

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        return parallel(self.norm(), attention, ff)

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {"norm": "input_layernorm"}

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        return replace(super().decoder(), logit_scale=self.logit_scale)

    @classmethod
    def full_every_from_hf(cls, keys: ConfigJson) -> int:
        """See `WithLayerTypes`."""
        pattern: int = keys.size("sliding_window_pattern", default=cls.FULL_EVERY)
        return pattern
