"""CodeGen (Nijkamp et al. 2022, arXiv:2203.13474): GPT-J whose files have one matrix for q, v and k."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.families.gptj import GptJConfig
from mesh_transformer.spec import Tensor

# the blocks of the matrix, which were the tensor-parallel shards of its training, and the parts of a block
_BLOCKS, _PARTS = 4, "qvk"


class CodeGenConfig(GptJConfig):
    """CodeGen: GPT-J whose files have q, v and k in four blocks of one matrix."""

    HF_MODEL_TYPE: ClassVar = "codegen"
    HF_ARCHITECTURE: ClassVar = "CodeGenForCausalLM"
    HF_BUFFERS: ClassVar = r"transformer\.h\.\d+\.attn\.(causal_mask|bias|masked_bias|embed_positions)"

    family: Literal["codegen"] = "codegen"  # type: ignore[assignment]
    """model family: a file in mesh_transformer/families"""
    pe: Literal["rotary"] = "rotary"
    """position encoding"""
    norm: Literal["layernorm"] = "layernorm"
    """normalization before each block and before the head"""

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.n_heads * self.d_head % _BLOCKS:
            raise UserError(
                f"model.n_heads {self.n_heads} x model.d_head {self.d_head} must be divisible by {_BLOCKS} in this "
                "family: change one of them"
            )
        return self

    def hf_tensors(self) -> list[Tensor]:
        """See `ModelConfig`."""
        fused = "transformer.h.{}.attn.qkv_proj.weight"
        view, sizes = "(block part f) d -> part d (block f)", {"block": _BLOCKS, "part": len(_PARTS)}
        parts = {f"blocks/attention/{name}/w": part for part, name in enumerate(_PARTS)}
        return [
            Tensor(row.parameter, fused, view, parts[row.parameter], sizes) if row.parameter in parts else row
            for row in super().hf_tensors()
        ]

    def classic_tensors(self) -> list[Tensor]:
        """See `ModelConfig`."""
        return ModelConfig.classic_tensors(self)
