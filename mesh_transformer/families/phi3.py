"""Phi-3 (Abdin et al. 2024, arXiv:2404.14219) and Phi-4: Llama with fused matrices in its files."""

from typing import Annotated, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.llama import fused_rows
from mesh_transformer.families.mistral import MistralLike
from mesh_transformer.families.rotary import PartlyRotary
from mesh_transformer.fields import Positive
from mesh_transformer.spec import TRANSPOSED, Tensor


class Phi3Config(MistralLike, PartlyRotary):
    """Phi-3 and Phi-4: Mistral whose files have one matrix for q, k and v, and one for the gate and its product."""

    HF_MODEL_TYPE: ClassVar = "phi3"
    HF_ARCHITECTURE: ClassVar = "Phi3ForCausalLM"
    HF_END_OF_TEXT: ClassVar = 32000
    HF_FUSED_GATE: ClassVar = True
    # of the longrope encoding, which is refused; and of files for their own code
    HF_IGNORED: ClassVar = ("original_max_position_embeddings", "auto_map")
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

    @classmethod
    def rotary_from_hf(cls, keys: ConfigJson, others: JsonObject) -> JsonObject:
        """See `RotaryConfig`. transformers takes yarn for longrope here."""
        fields = super().rotary_from_hf(keys, others)
        if fields["rotary_scaling"] != "none":
            raise UserError(f"rope_type is {fields['rotary_scaling']!r}: only default is supported in this family")
        return fields

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        if self.rotary_scaling != "none":
            reason = f"{self.HF_ARCHITECTURE} computes it without model.rotary_scaling {self.rotary_scaling}"
            self.refuse_hf([reason], "native", any_d_head=True)
        return super().to_hf()

    def attention_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        heads = {"q": self.n_heads, "k": self.n_kv_heads, "v": self.n_kv_heads}
        sizes = {f"blocks/attention/{name}/w": count * self.d_head for name, count in heads.items()}
        return [
            *fused_rows(sizes, f"{block}self_attn.qkv_proj.weight"),
            Tensor("blocks/attention/o/w", f"{block}self_attn.o_proj.weight", TRANSPOSED),
        ]
