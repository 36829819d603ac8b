"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786), the text model: Gemma 2 with norms of q and k, and two rotary bases."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gemma2 import Gemma2Like
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Only
from mesh_transformer.families.layer_types import WithLocalRotary
from mesh_transformer.fields import Count, Derived, Positive, Unit
from mesh_transformer.spec import AttentionSpec


class Gemma3Config(Gemma2Like, WithLocalRotary):
    """Gemma 3: Gemma 2 with norms of q and k, and a window in five of six layers, which have a lower rotary base."""

    HF_MODEL_TYPE: ClassVar = "gemma3_text"
    HF_ARCHITECTURE: ClassVar = "Gemma3ForCausalLM"
    GGUF: ClassVar = Gguf("gemma3", rules=("norm_plus_one",), assumed={"local_rotary_base": 10000.0}, wide_queries=62)
    FULL_EVERY: ClassVar = 6
    HF_LOCAL_BASE: ClassVar = "rope_local_base_freq"
    # transformers reads the first one and never uses it
    HF_FIXED: ClassVar = {
        **Gemma2Like.HF_FIXED,
        "attn_logit_softcapping": Only(None),
        "use_bidirectional_attention": Only(False, written=False),
    }
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": 9216,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    }

    family: Literal["gemma3"] = "gemma3"
    """model family: a file in mesh_transformer/families"""
    full_every: Annotated[Count | None, Unit("layers"), Derived("6, without layer_types")] = None
    """the last of each full_every layers has no window, and the others have one"""
    rotary_base: Positive = 1000000.0
    """base of the rotary frequencies in layers without a window"""
    local_rotary_base: Positive = 10000.0
    """base of the rotary frequencies in layers with a window, where they are not scaled"""

    @classmethod
    def full_every_from_hf(cls, keys: ConfigJson) -> int:
        """See `WithLayerTypes`. Earlier versions have a number instead of the list."""
        pattern: int = keys.size("sliding_window_pattern", default=cls.FULL_EVERY)
        return pattern

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm())
