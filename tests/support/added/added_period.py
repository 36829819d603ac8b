"""A model of unlike layers: two times (plain, gated), then a plain layer.

A plain layer is Llama's. A gated layer is one branch of three parts, one of which has its own norm of another kind. The
first plain layer has no rotation, and the last has a window. transformers does not have this family.
"""

from dataclasses import replace
from typing import Literal

from added_mechanism import GatedAttention

from mesh_transformer.families.llama import LlamaLike
from mesh_transformer.spec import Branch, Decoder, Dense, Layer, Rotary, Sublayer


class PeriodConfig(LlamaLike):
    """Plain layers, and layers with a gate and three parallel parts, in turn."""

    family: Literal["period"] = "period"
    """model family"""

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        attention, norm, ff = self.attention(), self.norm(), self.ff()
        assert isinstance(attention.positions, Rotary)
        unrotated = replace(attention, positions=replace(attention.positions, base=None))
        gate, wide = GatedAttention(**vars(attention)), Dense(name="wide", d_ff=self.d_ff, activation="relu")
        parts = (
            Sublayer(mechanism=gate),
            Sublayer(mechanism=ff),
            Sublayer(mechanism=wide, norm=replace(norm, kind="layer")),
        )
        gated, plain = Layer(branches=(Branch(pre=norm, parts=parts),)), self.layer(attention, ff)
        first, last = self.layer(unrotated, ff), self.layer(replace(attention, window=3), ff)
        return replace(super().decoder(), layers=(first, gated, plain, gated, last))
