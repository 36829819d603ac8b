"""The fields that every family's config has, and what a family says of itself."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from mesh_transformer.errors import UserError
from mesh_transformer.families.foreign import ConfigJson, Tensor
from mesh_transformer.families.spec import Decoder
from mesh_transformer.fields import CountOrZero, Derived, Dims, Group, Heads, Layers, Rows, Tokens, size


class ModelConfig(Group):
    """The architecture. Each family derives its own from this one."""

    HF_MODEL_TYPE: ClassVar[str]
    """model_type of config.json."""
    HF_ARCHITECTURE: ClassVar[str]
    """Their class."""
    HF_BUFFERS: ClassVar[str]
    """A pattern: tensors in some of their files that are no parameters."""
    HF_END_OF_TEXT: ClassVar[int]
    """The token that ends a text, if the tokenizer does not say."""

    family: str
    """model family: a file in mesh_transformer/families"""
    layers: Layers
    """number of transformer layers"""
    d_model: Dims
    """width of the residual stream; divisible by mesh.fsdp"""
    n_heads: Heads
    """attention heads; divisible by mesh.tp"""
    d_head: Annotated[Dims, Derived("d_model / n_heads")] = 0
    """width of one head"""
    d_ff: Annotated[Dims, Derived("4 * d_model")] = 0
    """hidden width of the feed-forward; divisible by mesh.tp"""
    n_vocab: Rows
    """rows of the vocabulary that take part in the softmax, samples and exports"""
    vocab_multiple: Rows = 128
    """tables get unused rows up to a multiple of this, so that mesh.tp divides them"""
    seq: Tokens = 2048
    """longest context"""
    seed: CountOrZero = 0
    """seed of the initial parameters; they do not depend on the mesh"""

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

    def architecture(self) -> dict[str, Any]:
        """The fields that decide what the tensors of a checkpoint compute."""
        return self.model_dump(exclude={"seq", "seed", "vocab_multiple"})

    @classmethod
    def from_hf(cls, keys: ConfigJson) -> Self:
        """The config that a config.json describes.

        Raises:
            UserError: it is none that we compute; names the key.
        """
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        """The keys of config.json that are the family's own.

        Raises:
            UserError: HF_ARCHITECTURE cannot compute this model.
        """
        raise NotImplementedError

    def hf_tensors(self) -> list[Tensor]:
        """The rows of the Hugging Face form, in the order in which the parameters are used."""
        raise NotImplementedError

    def classic_tensors(self) -> list[Tensor]:
        """The rows of the original program's form.

        Raises:
            UserError: it cannot express this model.
        """
        raise UserError(
            f"the classic form has no room for model.family {self.family}: keep it native, or Hugging Face's"
        )

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
