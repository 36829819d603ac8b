"""The base of a family's config: the common fields, and the interface of a family."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Gguf
from mesh_transformer.families.hf_keys import Hf, HfKeys, JsonObject
from mesh_transformer.fields import (
    INT32_MAX,
    CountOrZero,
    Derived,
    Dims,
    Heads,
    Layers,
    Rows,
    Size,
    Tokens,
    marks,
    size,
)
from mesh_transformer.spec import Activation, Decoder, Layer, NormSpec, Tensor

# the frequencies of the rotated dims are an array in memory, and a file may give any number
MOST_ROTARY_DIMS = 1 << 16

ActivationName = Literal["gelu", "gelu_tanh", "gelu_fast", "gelu_pytorch_tanh", "relu"]
"""The activation of feed-forward layers without a gate. Some names mean one function: an export has its origin's
name."""
# what each name computes
ACTIVATIONS: dict[ActivationName, Activation] = {
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# their names in config.json
HF_ACTIVATIONS: dict[ActivationName, str] = {**{name: name for name in ACTIVATIONS}, "gelu_tanh": "gelu_new"}


class ModelConfig(HfKeys):
    """The architecture. Each family extends this group."""

    HF_MODEL_TYPE: ClassVar[str | None] = None
    """`model_type` in config.json; None: transformers has no such model, and the family needs no other HF_ name."""
    HF_ARCHITECTURE: ClassVar[str]
    """The class in transformers."""
    HF_D_HEAD_FIXED: ClassVar = False
    """Whether that class has no other d_head than d_model / n_heads."""
    HF_PREFIX: ClassVar[str]
    """The first part of the names of all tensors but the head's."""
    HF_BUFFERS: ClassVar[str]
    """A regular expression for tensors in some files that are not parameters."""
    GGUF: ClassVar[Gguf | None] = None
    """How GGUF files hold the family's models; None: llama.cpp does not have them."""
    HF_END_OF_TEXT: ClassVar[int]
    """The token that ends a text, if the tokenizer does not define one."""

    family: str
    """model family: a file in mesh_transformer/families"""
    layers: Annotated[Layers, Hf("num_hidden_layers")]
    """number of transformer layers"""
    d_model: Annotated[Dims, Hf("hidden_size")]
    """width of the residual stream; divisible by mesh.fsdp"""
    n_heads: Annotated[Heads, Hf("num_attention_heads")]
    """attention heads; divisible by mesh.tp"""
    d_head: Annotated[Dims, Derived("d_model / n_heads")] = 0
    """width of a head"""
    d_ff: Annotated[Dims, Derived("4 * d_model"), Hf("intermediate_size")] = 0
    """hidden width of the feed-forward layer, or of an expert in a family without expert_d_ff; divisible by mesh.tp"""
    n_vocab: Annotated[Rows, Hf("vocab_size")]
    """size of the vocabulary in the softmax, in samples and in exports"""
    vocab_multiple: Rows = 128
    """the vocabulary tables are padded to a multiple of this number, so that mesh.tp divides them"""
    seq: Annotated[Tokens, Hf("max_position_embeddings")] = 2048
    """longest context"""
    seed: CountOrZero = 0
    """seed of the initial parameters, which do not depend on the mesh"""

    @classmethod
    def derive(cls, values: JsonObject) -> JsonObject:
        """Derive d_head, d_ff and the fields whose mark has a rule, from the valid fields."""
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
        for name, derived in marks(cls, Derived).items():
            if derived.of is not None and (number := size(values.get(derived.of))):
                values.setdefault(name, derived.rule(number))
        return values

    @model_validator(mode="after")
    def _check_vocabulary(self) -> Self:
        rows = Size("n_vocab", self.n_vocab, "vocab_multiple", self.vocab_multiple).whole
        if rows > INT32_MAX:
            raise UserError(
                f"model.n_vocab {self.n_vocab}, rounded up to a multiple of model.vocab_multiple "
                f"{self.vocab_multiple}, is {rows}: at most {INT32_MAX} rows are possible; lower one of them"
            )
        return self

    def decoder(self) -> Decoder:
        """The decoder that the config describes."""
        raise NotImplementedError

    def decoder_of(self, layers: Iterable[Layer], final_norm: NormSpec, *, tied: bool) -> Decoder:
        """A decoder of these layers, with the sizes of the config."""
        return Decoder(
            d_model=self.d_model,
            n_vocab=self.n_vocab,
            vocab_multiple=self.vocab_multiple,
            seq=self.seq,
            layers=tuple(layers),
            final_norm=final_norm,
            tied=tied,
        )

    def architecture(self) -> JsonObject:
        """The fields that define the function of a checkpoint's tensors."""
        fields = self.model_dump(mode="json", exclude={"seq", "seed", "vocab_multiple"})
        # two names of one function are no difference
        return {**fields, **({"activation": ACTIVATIONS[fields["activation"]]} if "activation" in fields else {})}

    def to_hf(self) -> JsonObject:
        """See `HfKeys`."""
        absent = [f"transformers has no model of model.family {self.family}"] if self.HF_MODEL_TYPE is None else []
        self.refuse_hf(absent, "native")
        return super().to_hf()

    def refuse_hf(self, reasons: list[str], instead: str) -> None:
        """Refuse the Hugging Face format for these reasons, or for a d_head that it cannot hold.

        Raises:
            UserError: there is a reason; `instead` names the formats that can hold the model.
        """
        if self.HF_D_HEAD_FIXED and self.n_heads * self.d_head != self.d_model:
            width = f"model.n_heads {self.n_heads} x model.d_head {self.d_head} is not model.d_model {self.d_model}"
            reasons = [*reasons, f"{width}, which {self.HF_ARCHITECTURE} requires"]
        if reasons:
            raise UserError(
                f"the Hugging Face format cannot hold this model: {'; '.join(reasons)}. Use the {instead} format"
            )

    def hf_unused(self, stored: Collection[str]) -> set[str]:
        """The `stored` names of tensors that are not parameters."""
        return {name for name in stored if re.fullmatch(self.HF_BUFFERS, name)}

    def hf_tensors(self) -> list[Tensor]:
        """The rows for the Hugging Face format, in the order in which the model uses the parameters."""
        raise NotImplementedError

    def classic_tensors(self) -> list[Tensor]:
        """The rows for the classic format, which the original program wrote.

        Raises:
            UserError: the format cannot hold this model.
        """
        raise UserError(
            f"the classic format cannot hold model.family {self.family}: use the native or the Hugging Face format"
        )

    def check_layers(self, field: str, numbers: Sequence[int]) -> None:
        """Refuse a list of layers, the value of `field`, that is not ascending or has a layer too many.

        Raises:
            UserError: as above.
        """
        if list(numbers) != sorted(set(numbers)) or (numbers and numbers[-1] >= self.layers):
            raise UserError(
                f"model.{field} {list(numbers)} must be ascending and less than model.layers {self.layers}, the first "
                "layer being 0"
            )

    def check_rotary(self, field: str, dims: int, *, odd: bool = False) -> None:
        """Refuse a number of rotary dims, the value of `field`, that does not fit a head.

        Args:
            odd: an odd number is allowed, and one dim more is rotated.

        Raises:
            UserError: the number is odd or exceeds d_head.
        """
        rotated = dims + dims % 2 if odd else dims
        if self.d_head < 2:
            raise UserError(
                f"model.d_head {self.d_head} is too narrow for rotary position encoding, which rotates pairs of dims: "
                f"lower model.n_heads {self.n_heads}, or set model.d_head to 2 or more"
            )
        if dims > MOST_ROTARY_DIMS:
            raise UserError(f"model.{field} {dims} is too large: at most {MOST_ROTARY_DIMS} dims are rotated")
        if rotated > self.d_head or rotated % 2:
            raise UserError(
                f"model.{field} {dims} must be even and at most model.d_head {self.d_head}: "
                f"set model.{field} to {self.d_head - self.d_head % 2} or less"
            )
