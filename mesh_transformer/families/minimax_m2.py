"""MiniMax-M2 (MiniMax 2025): experts that are chosen by sigmoid and bias, and norms of whole q and k."""

from dataclasses import replace
from typing import Any, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.experts import WithExperts
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, Only
from mesh_transformer.families.rotary import PartlyRotary
from mesh_transformer.spec import AttentionSpec, RouterSpec

# in MiniMax's earlier models, factors of what a branch of a layer adds
_FACTORS = ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")


class MiniMaxM2Config(WithExperts, PartlyRotary):
    """MiniMax-M2: experts in all layers, chosen by sigmoid and bias; norms of q and k over all heads."""

    HF_MODEL_TYPE: ClassVar = "minimax_m2"
    HF_ARCHITECTURE: ClassVar = "MiniMaxM2ForCausalLM"
    GGUF: ClassVar = Gguf("minimax-m2", gating=2, names={"e_score_correction_bias": "e_score_correction.bias"})
    HF_END_OF_TEXT: ClassVar = 200020
    HF_MODULE: ClassVar = "block_sparse_moe"
    HF_MATRICES: ClassVar = {"gate": "w1", "in": "w3", "out": "w2"}
    HF_ROUTER_BIAS: ClassVar = "e_score_correction_bias"
    HF_ROWS: ClassVar = {**WithExperts.HF_ROWS, "n_experts": Hf("num_local_experts", "num_experts")}
    # of the released files; transformers takes them for granted
    HF_FIXED: ClassVar = {
        **WithExperts.HF_FIXED,
        "scoring_func": Only("sigmoid", written=False),
        "use_qk_norm": Only(True, written=False),
        "qk_norm_type": Only("per_layer", written=False),
        "use_routing_bias": Only(True, written=False),
        "shared_intermediate_size": Only(0, written=False),
        **dict.fromkeys(_FACTORS, Only(1.0, written=False)),
    }
    # The layers that predict later tokens are not read. No model of this family has a shared expert or a window, whose
    # keys are the last line.
    HF_IGNORED: ClassVar = (
        *WithExperts.HF_IGNORED,
        *("auto_map", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
        *("mlp_intermediate_size", "shared_moe_mode", "swa_rope_theta"),
    )
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 62,
        "hidden_size": 3072,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 1536,
        "vocab_size": 200064,
        "max_position_embeddings": 196608,
        "rope_theta": 5000000.0,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
    }

    family: Literal["minimax_m2"] = "minimax_m2"
    """model family: a file in mesh_transformer/families"""

    def router(self) -> RouterSpec:
        """See `WithExperts`."""
        return replace(super().router(), scores="sigmoid", bias=True)

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm(), qk_norm_at="whole")

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> dict[str, Any]:
        """See `HfKeys`."""
        fields, types = super().fields_from_hf(keys), keys.take("attn_type_list", default=None)
        if types is not None and types != [1] * fields["layers"]:
            raise UserError(f"attn_type_list is {types!r:.60}: only 1 (full attention) in each layer is supported")
        return fields

    @classmethod
    def rotary_from_hf(cls, keys: ConfigJson, others: dict[str, Any]) -> dict[str, Any]:
        """See `RotaryConfig`. The released files have the number of rotated dims, rotary_dim."""
        dims = keys.size("rotary_dim", default=None)
        fields = super().rotary_from_hf(keys, others)
        if dims is None:
            return fields
        if fields["rotary_dims"] not in (dims, others["d_head"]):
            raise UserError(f"rotary_dim is {dims}, and partial_rotary_factor says {fields['rotary_dims']}: keep one")
        return {**fields, "rotary_dims": dims}
