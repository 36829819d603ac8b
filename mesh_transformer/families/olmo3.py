"""OLMo 3 (Olmo Team 2025): OLMo 2 with windows in most layers, where the rotary encoding is not scaled."""

from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.layer_types import WithLocalRotary
from mesh_transformer.families.olmo2 import Olmo2Like
from mesh_transformer.fields import Count, Derived, Unit


class Olmo3Config(Olmo2Like, WithLocalRotary):
    """OLMo 3: OLMo 2 with a window in three of four layers, where the rotary encoding is not scaled."""

    HF_MODEL_TYPE: ClassVar = "olmo3"
    HF_ARCHITECTURE: ClassVar = "Olmo3ForCausalLM"
    GGUF: ClassVar = Gguf("olmo2", needs="attention.sliding_window")
    FULL_EVERY: ClassVar = 4
    HF_DEFAULTS: ClassVar = {**Olmo2Like.HF_DEFAULTS, "sliding_window": 4096, "rope_theta": 500000.0}

    family: Literal["olmo3"] = "olmo3"
    """model family: a file in mesh_transformer/families"""
    full_every: Annotated[Count | None, Unit("layers"), Derived("4, without layer_types")] = None
    """the last of each full_every layers has no window, and the others have one"""
