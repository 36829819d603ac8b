"""Hunyuan dense models (Tencent 2025): Llama with norms of the heads of q and k after the rotation."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject
from mesh_transformer.families.llama import BiasedAttention
from mesh_transformer.fields import Positive
from mesh_transformer.spec import AttentionSpec, Tensor


class HunyuanDenseConfig(BiasedAttention):
    """Hunyuan: Llama with norms of the heads of q and k after the rotation."""

    HF_MODEL_TYPE: ClassVar = "hunyuan_v1_dense"
    HF_ARCHITECTURE: ClassVar = "HunYuanDenseV1ForCausalLM"
    GGUF: ClassVar = Gguf("hunyuan-dense")
    # transformers ignores them
    HF_IGNORED: ClassVar = (
        *("pretraining_tp", "add_classification_head", "attention_head_dim", "class_num", "cla_share_factor"),
        *("dense_list", "norm_type", "org_vocab_size", "pool_type", "use_cla", "use_qk_norm", "use_rotary_pos_emb"),
        *("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "mask_init_id", "pad_id"),
        *("eod_token_id", "sep_token_id"),
    )
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 290943,
        "max_position_embeddings": 2048,
    }

    family: Literal["hunyuan_v1_dense"] = "hunyuan_v1_dense"
    """model family: a file in mesh_transformer/families"""
    norm_eps: Annotated[Positive, Hf("rms_norm_eps")] = 1e-5
    """epsilon that each norm adds to the mean square"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), qk_norm=self.norm(), qk_norm_at="rotated_heads")

    def attention_tensors(self, block: str) -> list[Tensor]:
        """See `LlamaLike`."""
        theirs = {f"{name}_norm": norm for name, norm in (("q", "query_layernorm"), ("k", "key_layernorm"))}
        rows = super().attention_tensors(block)
        for ours, norm in theirs.items():
            rows = [row._replace(foreign=row.foreign.replace(f".{ours}.", f".{norm}.")) for row in rows]
        return rows

    @classmethod
    def rotary_from_hf(cls, keys: ConfigJson, others: JsonObject) -> JsonObject:
        """See `RotaryConfig`. With `alpha`, the kind "dynamic" is another base, at any length."""
        given = {name: keys.take(name, default=None) for name in ("rope_theta", "rope_scaling", "rope_parameters")}
        rope = given["rope_scaling"] or given["rope_parameters"]
        dynamic = isinstance(rope, dict) and "dynamic" in (rope.get("rope_type"), rope.get("type"))
        if not dynamic or not rope.get("alpha"):
            return super().rotary_from_hf(ConfigJson(given), others)
        theta = given["rope_theta"] if rope.get("rope_theta") is None else rope["rope_theta"]
        fields = super().rotary_from_hf(ConfigJson({} if theta is None else {"rope_theta": theta}), others)
        alpha = ConfigJson(rope).number("alpha", default=None)
        dims = others["d_head"] or others["d_model"] // others["n_heads"]
        if dims <= 2:
            raise UserError(f"head_dim is {dims}: rope_parameters with alpha need more than 2")
        return {**fields, "rotary_base": fields["rotary_base"] * alpha ** (dims / (dims - 2))}
