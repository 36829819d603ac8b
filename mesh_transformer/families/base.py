"""The fields that every family's config has, and what a family says of itself."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from mesh_transformer.errors import UserError
from mesh_transformer.families.spec import Decoder
from mesh_transformer.fields import (
    CountOrZero,
    Derived,
    Dims,
    Group,
    Heads,
    Layers,
    Rows,
    Tokens,
    size,
)


class ModelConfig(Group):
    """The architecture. Each family derives its own from this one."""

    NOT_COMPARED: ClassVar = ("seq", "seed", "vocab_multiple")
    """Fields that do not change what the tensors of a checkpoint compute."""

    family: str = Field(description="model family: a file in mesh_transformer/families")
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
    seed: CountOrZero = Field(0, description="seed of the initial parameters; they do not depend on the mesh")

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """d_head and d_ff from d_model and n_heads, where those are usable."""
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
        return values

    def decoder(self) -> Decoder:
        """What the config describes."""
        raise NotImplementedError

    def check_rotary(self, field: str, dims: int) -> None:
        """Refuse a number of rotary dims, given by `field`, that a head cannot have.

        Raises:
            UserError: it is odd or more than a head has.
        """
        if self.d_head < 2:
            raise UserError(
                f"model.d_head {self.d_head} is too narrow for rotary position encoding, which rotates pairs of dims: "
                f"lower model.n_heads {self.n_heads}, or set model.d_head to 2 or more"
            )
        if dims > self.d_head or dims % 2:
            raise UserError(
                f"model.{field} {dims} must be even and at most model.d_head {self.d_head}: "
                f"set model.{field} to {self.d_head - self.d_head % 2} or less"
            )

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary tables: n_vocab rounded up to vocab_multiple, whatever the mesh."""
        return -(-self.n_vocab // self.vocab_multiple) * self.vocab_multiple
