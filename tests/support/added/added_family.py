"""A family with another wiring: norms after the branches only, and what a branch adds is scaled."""

from typing import Annotated, ClassVar, Literal

from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.llama import LlamaLike
from mesh_transformer.fields import Positive
from mesh_transformer.spec import AttentionMixer, Branch, Layer, Mechanism, Sublayer


class AddedConfig(LlamaLike):
    """x += branch_scale * norm(mechanism(x))."""

    HF_MODEL_TYPE: ClassVar = "added"
    HF_ARCHITECTURE: ClassVar = "AddedForCausalLM"

    family: Literal["added"] = "added"
    """model family"""
    branch_scale: Annotated[Positive, Hf("branch_scale")] = 0.5
    """what multiplies each branch"""

    def layer(self, attention: AttentionMixer, ff: Mechanism) -> Layer:
        """See `LlamaLike`."""
        norm, scale = self.norm(), self.branch_scale
        branches = [Branch(parts=(Sublayer(mechanism=one),), post=norm, scale=scale) for one in (attention, ff)]
        return Layer(branches=tuple(branches))

    def norms_to_hf(self) -> dict[str, str]:
        """See `LlamaLike`."""
        return {"attention_post_norm": "post_attention_layernorm", "ff_post_norm": "post_feedforward_layernorm"}
