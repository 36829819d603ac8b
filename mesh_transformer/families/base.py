"""The fields that every family's config has, what a family says of itself, and the keys of a config.json."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from mesh_transformer.errors import UserError
from mesh_transformer.families.spec import Decoder, Tensor
from mesh_transformer.fields import (
    INT32_MAX,
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

# what transformers, or a tool around it, keeps in config.json beside the architecture
_HARMLESS = re.compile(
    r"_.* | .*_token_id | .*drop(out)?(_prob)? | summary_.* | .*_version | architectures | (torch_)?dtype | use_cache"
    r"| initializer_range | id2label | label2id | problem_type | task_specific_params | finetuning_task | tokenizer(_class)?"
    r"| prefix | output_.* | return_dict(_in_generate)? | torchscript | is_decoder | chunk_size_feed_forward"
    r"| gradient_checkpointing | custom_pipelines | max_(new_tokens|length) | min_length | do_sample | temperature"
    r"| (top|typical)_[kp] | num_beams | num_beam_groups | num_return_sequences | .*_penalty | .*no_repeat_ngram_size"
    r"| rotary | scale_attn_weights | n_ctx | jax | compat | badwordsids | newlinemode | antemplate | formatoptns | welcome",
    re.VERBOSE,
)


class ConfigJson:
    """The keys of a config.json: a family takes those that it knows, and `refuse_rest` looks at what is left."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def take(self, *names: str, default: Any) -> Any:
        """The value of a key that has one of these names.

        Raises:
            UserError: two names have two values.
        """
        found = {name: self._left.pop(name) for name in names if name in self._left}
        given = {name: value for name, value in found.items() if value is not None}
        value = next(iter(given.values()), None if found else default)
        if any(other != value for other in given.values()):
            said = " and ".join(f"{name} is {value!r:.60}" for name, value in given.items())
            raise UserError(f"{said}: they mean the same, keep one")
        return value

    def size(self, *names: str, default: int | None, why: str = "") -> Any:
        """A whole number of 1 or more; where the default is None, null is None.

        Raises:
            UserError: it is something else.
        """
        value = self.take(*names, default=default)
        if value is None and default is None:
            return None
        if type(value) is not int or not 1 <= value <= INT32_MAX:
            raise UserError(f"{names[0]} is {value!r:.60}: expected a whole number of 1 or more{why}")
        return value

    def number(self, *names: str, default: float, most: float = 1e30) -> float:
        """A number above 0 and at most `most`.

        Raises:
            UserError: it is something else.
        """
        value = self.take(*names, default=default)
        if type(value) not in (int, float) or not 0 < value <= most:
            raise UserError(f"{names[0]} is {value!r:.60}: expected a number above 0 and at most {most:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false.

        Raises:
            UserError: it is something else.
        """
        value = self.take(name, default=default)
        if type(value) is not bool:
            raise UserError(f"{name} is {value!r:.60}: expected true or false")
        return value

    def refuse_rest(self) -> None:
        """Refuse a key that nobody took, unless it is off (null, false, 0, empty) or known to be no matter of arithmetic.

        Raises:
            UserError: names the key.
        """
        if self._left.get("quantization_config"):
            raise UserError("the weights are quantized (quantization_config): save them in float first")
        for name, value in self._left.items():
            if value and not _HARMLESS.fullmatch(name):
                raise UserError(
                    f"{name!r:.60} is {value!r:.60}: this key is not known here, and may change what the model "
                    "computes; if it does not, remove it from config.json"
                )


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

    def refuse_hf(self, reasons: list[str], keep: str) -> None:
        """Refuse the Hugging Face form for these reasons, or for a width of heads that is not d_model / n_heads.

        Raises:
            UserError: there is a reason; `keep` says what form to keep.
        """
        if self.n_heads * self.d_head != self.d_model:
            width = f"model.n_heads {self.n_heads} x model.d_head {self.d_head} is not model.d_model {self.d_model}"
            reasons = [*reasons, f"{width}, as {self.HF_ARCHITECTURE} has it"]
        if reasons:
            raise UserError(f"this model has no Hugging Face form: {'; '.join(reasons)}. Keep it {keep}")

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
