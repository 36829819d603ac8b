"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with routed experts in every layer."""

from typing import ClassVar, Literal

from mesh_transformer.families.experts import WithExperts
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf
from mesh_transformer.families.mistral import MistralConfig


class MixtralConfig(WithExperts, MistralConfig):
    """Mixtral: Mistral with experts in every layer, weighted by the softmax of the chosen experts' logits."""

    HF_MODEL_TYPE: ClassVar = "mixtral"
    HF_ARCHITECTURE: ClassVar = "MixtralForCausalLM"
    GGUF: ClassVar = Gguf(
        "llama", needs="expert_count", rules=("permuted_heads",),
        names={r"model\.(layers\.\d+\.)block_sparse_moe\.experts\.": r"\1feed_forward.experts."},
    )  # fmt: skip
    HF_MODULE: ClassVar = "block_sparse_moe"
    HF_MATRICES: ClassVar = {"gate": "w1", "in": "w3", "out": "w2"}
    HF_ROWS: ClassVar = {**MistralConfig.HF_ROWS, "n_experts": Hf("num_local_experts")}
    HF_DEFAULTS: ClassVar = {
        **MistralConfig.HF_DEFAULTS,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }

    family: Literal["mixtral"] = "mixtral"  # type: ignore[assignment]
    """model family: a file in mesh_transformer/families"""
