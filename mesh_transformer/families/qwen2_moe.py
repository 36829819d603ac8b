"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024, arXiv:2407.10671): Qwen2 with experts, and one that all tokens share."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from mesh_transformer.errors import UserError
from mesh_transformer.families.experts import SomeDense
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import ConfigJson, Hf, JsonObject, Only
from mesh_transformer.fields import Derived, Dims
from mesh_transformer.spec import AttentionSpec, ExpertsSpec


class QwenExperts(SomeDense):
    """The keys of config.json that both Qwen families with experts have."""

    HF_END_OF_TEXT: ClassVar = 151643
    # without windows, the last two have no effect
    HF_IGNORED: ClassVar = (*SomeDense.HF_IGNORED, "sliding_window", "max_window_layers")
    HF_WRITTEN: ClassVar = {**SomeDense.HF_WRITTEN, "use_sliding_window": False, "decoder_sparse_step": 1}
    HF_DEFAULTS: ClassVar = {
        "num_hidden_layers": 24,
        "hidden_size": 2048,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    }

    @classmethod
    def fields_from_hf(cls, keys: ConfigJson) -> JsonObject:
        """See `LlamaLike`."""
        fields = super().fields_from_hf(keys)
        if keys.flag("use_sliding_window", default=False):
            raise UserError("use_sliding_window is true: layers with a sliding window are not supported in this family")
        types = keys.take("layer_types", default=None) or []
        if not isinstance(types, list) or any(kind != "full_attention" for kind in types):
            raise UserError(f"layer_types is {types!r:.60}: only full_attention is supported in this family")
        step = keys.size("decoder_sparse_step", default=1)
        only = keys.take("mlp_only_layers", default=None) or []
        if not isinstance(only, list) or any(type(layer) is not int for layer in only):
            raise UserError(f"mlp_only_layers is {only!r:.60}: expected a list of layers")
        listed = set(only)
        dense = [layer for layer in range(fields["layers"]) if layer in listed or (layer + 1) % step]
        return {**fields, "dense_layers": dense}

    def to_hf(self) -> JsonObject:
        """See `ModelConfig`."""
        return {**super().to_hf(), "mlp_only_layers": list(self.dense_layers)}


class Qwen2MoeConfig(QwenExperts):
    """Qwen2-MoE: Llama with biases on q, k and v, experts, and a gated expert that all tokens share."""

    HF_MODEL_TYPE: ClassVar = "qwen2_moe"
    HF_ARCHITECTURE: ClassVar = "Qwen2MoeForCausalLM"
    GGUF: ClassVar = Gguf("qwen2moe", assumed={"router_normalize": False})
    HF_FIXED: ClassVar = {**QwenExperts.HF_FIXED, "qkv_bias": Only(True, written=False)}
    HF_DEFAULTS: ClassVar = {
        **QwenExperts.HF_DEFAULTS,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 5632,
    }

    family: Literal["qwen2_moe"] = "qwen2_moe"
    """model family: a file in mesh_transformer/families"""
    shared_d_ff: Annotated[Dims, Derived("d_ff", of="d_ff"), Hf("shared_expert_intermediate_size")] = 0
    """hidden width of the expert that all tokens go through, in addition to the experts that the router chooses;
    divisible by mesh.tp"""

    def attention(self) -> AttentionSpec:
        """See `LlamaLike`."""
        return replace(super().attention(), bias=True)

    def experts(self) -> ExpertsSpec:
        """See `WithExperts`."""
        shared = replace(self.ff(), d_ff=self.shared_d_ff, d_ff_field="shared_d_ff")
        return replace(super().experts(), shared=shared, shared_gate=True)
