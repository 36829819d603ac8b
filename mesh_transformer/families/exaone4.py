"""EXAONE 4.0 (LG AI Research 2025, arXiv:2507.11407): norms after each sublayer, and of the heads of q and k; layers
without a window have no rotary encoding."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.layer_types import SLIDING, WithLayerTypes
from mesh_transformer.fields import Count, Derived, Positive, Unit
from mesh_transformer.spec import AttentionMixer, AttentionSpec, Layer, Mechanism, Rotary, post


class Exaone4Config(WithLayerTypes):
    """EXAONE 4.0: Llama with norms after each sublayer and of the heads of q and k. With windows, the layers without
    one have no rotary encoding."""

    HF_MODEL_TYPE: ClassVar = "exaone4"
    HF_ARCHITECTURE: ClassVar = "Exaone4ForCausalLM"
    GGUF: ClassVar = Gguf("exaone4")
    FULL_EVERY: ClassVar = 4
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "intermediate_size": 16384,
        "vocab_size": 102400,
        "max_position_embeddings": 2048,
        "sliding_window": 4096,
    }

    family: Literal["exaone4"] = "exaone4"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-5
    """epsilon that each norm adds to the mean square"""
    full_every: Annotated[Count | None, Unit("layers"), Derived("4, without layer_types")] = None
    """the last of each full_every layers has no window, and the others have one"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm())

    def rotaries(self) -> list[Rotary]:
        """See `LlamaLike`."""
        rotary = self.rotary()
        absent = replace(rotary, base=None, scaling=None)
        return [rotary if self.window is None or kind == SLIDING else absent for kind in self.types()]

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        return post(self.norm(), attention, ff)

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {"attention_post_norm": "post_attention_layernorm", "ff_post_norm": "post_feedforward_layernorm"}

    @classmethod
    def full_every_from_hf(cls, keys: ConfigJson) -> int:
        """See `WithLayerTypes`. "LLLG" is another word for 4: three layers with a window, and one without."""
        pattern = keys.take("sliding_window_pattern", default=cls.FULL_EVERY)
        if isinstance(pattern, str) and pattern and pattern == "L" * (len(pattern) - 1) + "G":
            return len(pattern)
        if pattern is None or (type(pattern) is int and pattern == 0):
            return 1
        if type(pattern) is int and pattern > 0:
            return pattern
        raise UserError(f"sliding_window_pattern is {pattern!r:.60}: expected a number, or a text such as LLLG")

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        return {**super().to_hf(), "sliding_window_pattern": self.full_every or self.FULL_EVERY}
