"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219) and Phi-4: Llama with fused matrices in its files."""

import math
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf
from mesh_transformer.families.llama import fused_rows
from mesh_transformer.families.mistral import MistralLike
from mesh_transformer.families.rotary import PartlyRotary
from mesh_transformer.fields import Positive, Tokens
from mesh_transformer.spec import TRANSPOSED, Scaling, Tensor

_ORIGINAL = "original_max_position_embeddings"


class Phi3Config(MistralLike, PartlyRotary):
    """Phi-3 and Phi-4: Mistral whose files have one matrix for q, k and v, and one for the gate and its product."""

    HF_MODEL_TYPE: ClassVar = "phi3"
    HF_ARCHITECTURE: ClassVar = "Phi3ForCausalLM"
    GGUF: ClassVar = Gguf("phi3")
    HF_END_OF_TEXT: ClassVar = 32000
    HF_FUSED_GATE: ClassVar = True
    # of files for their own code
    HF_IGNORED: ClassVar = ("auto_map", "full_attn_mod", "interpolate_factor")
    SCALINGS: ClassVar = {
        "none": ((), ()),
        "longrope": (("short_factors", "long_factors", "original_seq", "attention_factor"), ()),
    }
    # as in transformers
    HF_SCALINGS: ClassVar = {"su": "longrope", "yarn": "longrope"}
    # the default of the last is outside of a small vocabulary
    HF_WRITTEN: ClassVar = {**MistralLike.HF_WRITTEN, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "pad_token_id": None}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "intermediate_size": 8192,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
    }

    family: Literal["phi3"] = "phi3"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-5
    """epsilon that each norm adds to the mean square"""

    rotary_scaling: Literal["none", "longrope"] = "none"  # type: ignore[assignment]
    """longrope: each rotary frequency is divided by a number of its own, for a context longer than the original one"""
    rotary_original_seq: Tokens | None = None
    """longrope: the longest context before it was stretched"""
    rotary_short_factors: tuple[Positive, ...] | None = None
    """longrope: the numbers that divide the frequencies if model.seq is at most rotary_original_seq"""
    rotary_long_factors: tuple[Positive, ...] | None = None
    """longrope: the numbers that divide the frequencies if model.seq is longer"""
    rotary_attention_factor: Positive | None = None
    """longrope: the number that multiplies sines and cosines"""

    @model_validator(mode="after")
    def _check_factors(self) -> Self:
        for name in ("rotary_short_factors", "rotary_long_factors"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != self.rotary_dims // 2:
                raise UserError(
                    f"model.{name} has {len(factors)} entries for model.rotary_dims {self.rotary_dims}: give "
                    f"{self.rotary_dims // 2}, one for each pair"
                )
        return self

    def scaling(self) -> Scaling | None:
        """See `RotaryConfig`."""
        if self.rotary_scaling == "none":
            return None
        original, factor = self.rotary_original_seq, self.rotary_attention_factor
        assert original is not None
        assert factor is not None
        factors = self.rotary_long_factors if self.seq > original else self.rotary_short_factors
        assert factors is not None
        return Scaling(kind="longrope", factor=1.0, original_seq=original, attention_factor=factor, factors=factors)

    @classmethod
    def rotary_from_hf(cls, keys: ConfigJson, others: dict[str, Any]) -> dict[str, Any]:
        """See `RotaryConfig`. The longest context before it was stretched stands beside the other keys."""
        original = keys.size(_ORIGINAL, default=4096)
        fields = super().rotary_from_hf(keys, others)
        if fields["rotary_scaling"] == "none":
            return fields
        factor = others["seq"] / original
        stretched = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return {
            **fields,
            "rotary_original_seq": original,
            "rotary_attention_factor": fields["rotary_attention_factor"] or stretched,
        }

    def rotary_to_hf(self) -> dict[str, Any]:
        """See `RotaryConfig`."""
        original = self.rotary_original_seq
        return {**super().rotary_to_hf(), **({} if original is None else {_ORIGINAL: original})}

    def attention_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        heads = {"q": self.n_heads, "k": self.n_kv_heads, "v": self.n_kv_heads}
        sizes = {f"blocks/attention/{name}/w": count * self.d_head for name, count in heads.items()}
        return [
            *fused_rows(sizes, f"{block}self_attn.qkv_proj.weight"),
            Tensor("blocks/attention/o/w", f"{block}self_attn.o_proj.weight", TRANSPOSED),
        ]
