"""GPT-J (Wang and Komatsuzaki 2021), with the classic switches for position encoding and norm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.families.spec import Attention, Decoder, Dense, Layer, Norm, Rotary
from mesh_transformer.fields import Derived, Dims, size


def _one_norm(value: Any) -> Any:
    if value == "layernorm-desync":
        raise UserError(
            "each shard of the original had a norm of its own, and here there is one: did you mean layernorm?"
        )
    return value


NORMS = {
    "layernorm": Norm(),
    "layernorm-nobias": Norm(offset=False),
    "rmsnorm": Norm(kind="length", offset=False),
    "rmsnorm-bias": Norm(kind="length"),
    "scalenorm": Norm(kind="length", offset=False, one_scale=True),
    "scalenorm-bias": Norm(kind="length", one_scale=True),
}


class Config(ModelConfig):
    """GPT-J: attention and feed-forward in parallel from one norm; an untied head with a bias."""

    family: Literal["gptj"] = "gptj"
    """model family: a file in mesh_transformer/families"""
    pe: Literal["rotary", "fixed", "t5"] = "rotary"
    """position encoding: rotary (GPT-J), fixed (a learned table), t5 (relative bias)"""
    pe_rotary_dims: Annotated[Dims, Derived("d_head")] = 0
    """first dims of each head that rotary turns; even, at most d_head (GPT-J-6B: 64 of 256)"""
    norm: Annotated[
        Literal["layernorm", "layernorm-nobias", "rmsnorm", "rmsnorm-bias", "scalenorm", "scalenorm-bias"],
        BeforeValidator(_one_norm),
    ] = "layernorm"
    """normalisation before each block and before the head"""

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """pe_rotary_dims besides."""
        values = super().derive(values)
        if d_head := size(values.get("d_head")):
            values.setdefault("pe_rotary_dims", d_head)
        return values

    @model_validator(mode="after")
    def _check(self) -> Config:
        if self.pe == "rotary":
            self.check_rotary("pe_rotary_dims", self.pe_rotary_dims)
        return self

    def architecture(self) -> dict[str, Any]:
        """See `ModelConfig`; rotary dims only where there is a rotation."""
        fields = super().architecture()
        return fields if self.pe == "rotary" else {k: v for k, v in fields.items() if k != "pe_rotary_dims"}

    def decoder(self) -> Decoder:
        """See `ModelConfig`."""
        rotary = Rotary(dims=self.pe_rotary_dims, style="pairs", precision="float64")
        layer = Layer(
            attention=Attention(
                heads=self.n_heads, head_dim=self.d_head, rotary=rotary if self.pe == "rotary" else None
            ),
            ff=Dense(d_ff=self.d_ff, activation="gelu_tanh"),
            norm=NORMS[self.norm],
            wiring="parallel_one_norm",
        )
        return Decoder(
            d_model=self.d_model,
            n_vocab=self.n_vocab,
            vocab_multiple=self.vocab_multiple,
            seq=self.seq,
            layers=(layer,) * self.layers,
            final_norm=NORMS[self.norm],
            embed_bias=True,
            learned_positions=self.pe == "fixed",
            relative_bias=self.pe == "t5",
            head_bias=True,
        )
