"""The group `model`: the architecture and its precision."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.fields import (
    CountOrZero,
    Derived,
    Dims,
    Group,
    Heads,
    Layers,
    Mebibytes,
    Rows,
    Tokens,
    size,
)


def _one_norm(value: Any) -> Any:
    if value == "layernorm-desync":
        raise UserError(
            "each shard of the original had a norm of its own, and here there is one: did you mean layernorm?"
        )
    return value


Norm = Literal["layernorm", "layernorm-nobias", "rmsnorm", "rmsnorm-bias", "scalenorm", "scalenorm-bias"]
Remat = Literal["auto", "none", "full", "save_attn", "save_matmuls"]


class ModelConfig(Group):
    """The architecture and the precision it computes in."""

    family: Literal["gptj"] = Field("gptj", description="model family: a file in mesh_transformer/models")
    layers: Layers = Field(description="number of transformer layers")
    d_model: Dims = Field(description="width of the residual stream; divisible by mesh.fsdp")
    n_heads: Heads = Field(description="attention heads; divisible by mesh.tp")
    d_head: Annotated[Dims, Derived("d_model / n_heads")] = Field(0, description="width of one head")
    d_ff: Annotated[Dims, Derived("4 * d_model")] = Field(
        0, description="hidden width of the feed-forward; divisible by mesh.tp"
    )
    n_vocab: Rows = Field(
        description="rows of the vocabulary that take part in the softmax, samples and exports"
    )
    vocab_multiple: Rows = Field(
        128, description="tables get unused rows up to a multiple of this, so that mesh.tp divides them"
    )
    seq: Tokens = Field(2048, description="longest context")
    pe: Literal["rotary", "fixed", "t5"] = Field(
        "rotary", description="position encoding: rotary (GPT-J), fixed (a learned table), t5 (relative bias)"
    )
    pe_rotary_dims: Annotated[Dims, Derived("d_head")] = Field(
        0, description="first dims of each head that rotary turns; even, at most d_head (GPT-J-6B: 64 of 256)"
    )
    norm: Annotated[Norm, BeforeValidator(_one_norm)] = Field(
        "layernorm", description="normalisation before each block and before the head"
    )
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="dtype of the arithmetic; auto: bfloat16 on TPU and GPU, float32 on CPU"
    )
    remat: Remat = Field(
        "auto",
        description="what the backward pass recomputes: none; full (everything but the block's input); save_attn "
        "(keeps the attention output); save_matmuls (keeps attention output and feed-forward hidden); "
        "auto: none on CPU, full elsewhere",
    )
    scan_unroll: Layers = Field(
        1, description="layers unrolled per scan iteration; more runs faster and compiles slower"
    )
    logits_mib: Literal["auto"] | Mebibytes = Field(
        "auto",
        description="float32 logits that a device holds at a time in training and validation, in MiB: the head and the "
        "loss run over the positions in that many parts; auto: 128 on CPU, 1024 elsewhere",
    )
    seed: CountOrZero = Field(0, description="seed of the initial parameters; they do not depend on the mesh")

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """d_head, d_ff and pe_rotary_dims from d_model and n_heads, where those are usable."""
        d_model, n_heads = size(values.get("d_model")), size(values.get("n_heads"))
        if d_model:
            values.setdefault("d_ff", 4 * d_model)
        if d_model and n_heads and "d_head" not in values:
            if d_model % n_heads:
                raise UserError(
                    f"model.d_model {d_model} is not divisible by model.n_heads {n_heads}: "
                    f"change one of them or set model.d_head"
                )
            values["d_head"] = d_model // n_heads
        if d_head := size(values.get("d_head")):
            values.setdefault("pe_rotary_dims", d_head)
        return values

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.pe == "rotary" and self.d_head < 2:
            raise UserError(
                f"model.d_head {self.d_head} is too narrow for model.pe rotary, which turns pairs of dims: "
                f"lower model.n_heads {self.n_heads}, or set model.d_head to 2 or more"
            )
        if self.pe == "rotary" and (self.pe_rotary_dims > self.d_head or self.pe_rotary_dims % 2):
            raise UserError(
                f"model.pe_rotary_dims {self.pe_rotary_dims} must be even and at most model.d_head {self.d_head}: "
                f"set model.pe_rotary_dims to {self.d_head - self.d_head % 2} or less"
            )
        return self

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary tables: n_vocab rounded up to vocab_multiple, whatever the mesh."""
        return -(-self.n_vocab // self.vocab_multiple) * self.vocab_multiple
