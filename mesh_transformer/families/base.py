"""The base of a family's config: the common fields, the interface of a family, and the reader of config.json."""

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from mesh_transformer.errors import UserError
from mesh_transformer.fields import (
    INT32_MAX,
    CountOrZero,
    Derived,
    Dims,
    Group,
    Heads,
    Layers,
    Rows,
    Size,
    Tokens,
    size,
)
from mesh_transformer.spec import Activation, Decoder, Tensor

# keys of config.json, from transformers or from tools around it, that do not affect the model
_HARMLESS = re.compile(
    r"_.* | .*_token_id | .*drop(out)?(_prob)? | summary_.* | .*_version | architectures | (torch_)?dtype | use_cache"
    r"| initializer_range | id2label | label2id | problem_type | task_specific_params | finetuning_task"
    r"| tokenizer(_class)? | prefix | output_.* | return_dict(_in_generate)? | torchscript | is_decoder"
    r"| chunk_size_feed_forward | gradient_checkpointing | custom_pipelines | max_(new_tokens|length) | min_length"
    r"| do_sample | temperature"
    r"| (top|typical)_[kp] | num_beams | num_beam_groups | num_return_sequences | .*_penalty | .*no_repeat_ngram_size"
    r"| rotary | scale_attn_weights | n_ctx | jax | compat | badwordsids | newlinemode | antemplate | formatoptns"
    r"| welcome",
    re.VERBOSE,
)

# the frequencies of the rotated dims are an array in memory, and a file may give any number
MOST_ROTARY_DIMS = 1 << 16

TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
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
# the names that differ in config.json
_HF_ACTIVATIONS: dict[ActivationName, str] = {"gelu_tanh": "gelu_new"}


class ConfigJson:
    """The keys of a config.json. A family takes the keys that it knows; `refuse_rest` checks the others."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._left = dict(values)

    def take(self, *names: str, default: Any) -> Any:
        """The value of the key that has any of these names.

        Raises:
            UserError: two of the names are given, with different values.
        """
        found = {name: self._left.pop(name) for name in names if name in self._left}
        given = {name: value for name, value in found.items() if value is not None}
        value = next(iter(given.values()), None if found else default)
        if any(other != value for other in given.values()):
            said = " and ".join(f"{name} is {value!r:.60}" for name, value in given.items())
            raise UserError(f"{said}: these keys mean the same, keep one")
        return value

    def size(
        self,
        *names: str,
        default: int | None,
        null: bool = False,
        least: int = 1,
        most: int = INT32_MAX,
        why: str = "",
    ) -> Any:
        """A whole number from `least` to `most`; None, if the value is null and `null` allows it or the default is
        None.

        Raises:
            UserError: the value is something else.
        """
        value = self.take(*names, default=default)
        if value is None and (null or default is None):
            return None
        if type(value) is not int or not least <= value <= most:
            limits = f"of {least} or more" if most == INT32_MAX else f"from {least} to {most}"
            raise UserError(f"{names[0]} is {value!r:.60}: expected a whole number {limits}{why}")
        return value

    def number(
        self, *names: str, default: float | None, most: float = 1e30, null: bool = False, zero: bool = False
    ) -> Any:
        """A number above 0, or 0 if `zero` allows it, and at most `most`; None, if the value is null and `null` allows
        it or the default is None.

        Raises:
            UserError: the value is something else.
        """
        value = self.take(*names, default=default)
        if value is None and (null or default is None):
            return None
        if type(value) not in (int, float) or not 0 <= value <= most or (value == 0 and not zero):
            limits = f"from 0 to {most:g}" if zero else f"above 0 and at most {most:g}"
            raise UserError(f"{names[0]} is {value!r:.60}: expected a number {limits}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false.

        Raises:
            UserError: the value is something else.
        """
        value = self.take(name, default=default)
        if type(value) is not bool:
            raise UserError(f"{name} is {value!r:.60}: expected true or false")
        return value

    def refuse_rest(self) -> None:
        """Refuse a key that the family did not take, unless it is off (null, false, 0, empty) or cannot affect the
        model.

        Raises:
            UserError: names the key.
        """
        if self._left.get("quantization_config"):
            raise UserError("the weights are quantized (quantization_config): save them in float first")
        for name, value in self._left.items():
            if value and not _HARMLESS.fullmatch(name):
                raise UserError(
                    f"{name!r:.60} is {value!r:.60}: this key is unknown and may change what the model "
                    "computes; if it does not, remove it from config.json"
                )


class ModelConfig(Group):
    """The architecture. Each family extends this group."""

    HF_MODEL_TYPE: ClassVar[str]
    """`model_type` in config.json."""
    HF_ARCHITECTURE: ClassVar[str]
    """The class in transformers."""
    HF_PREFIX: ClassVar[str]
    """The first part of the names of all tensors but the head's."""
    HF_BUFFERS: ClassVar[str]
    """A regular expression for tensors in some files that are not parameters."""
    HF_END_OF_TEXT: ClassVar[int]
    """The token that ends a text, if the tokenizer does not define one."""

    family: str
    """model family: a file in mesh_transformer/families"""
    layers: Layers
    """number of transformer layers"""
    d_model: Dims
    """width of the residual stream; divisible by mesh.fsdp"""
    n_heads: Heads
    """attention heads; divisible by mesh.tp"""
    d_head: Annotated[Dims, Derived("d_model / n_heads")] = 0
    """width of a head"""
    d_ff: Annotated[Dims, Derived("4 * d_model")] = 0
    """hidden width of the feed-forward layer, or of an expert in a family without expert_d_ff; divisible by mesh.tp"""
    n_vocab: Rows
    """size of the vocabulary in the softmax, in samples and in exports"""
    vocab_multiple: Rows = 128
    """the vocabulary tables are padded to a multiple of this number, so that mesh.tp divides them"""
    seq: Tokens = 2048
    """longest context"""
    seed: CountOrZero = 0
    """seed of the initial parameters, which do not depend on the mesh"""

    @classmethod
    def derive(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Derive d_head and d_ff from d_model and n_heads, if these are valid."""
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

    def architecture(self) -> dict[str, Any]:
        """The fields that define the function of a checkpoint's tensors."""
        fields = self.model_dump(mode="json", exclude={"seq", "seed", "vocab_multiple"})
        # two names of one function are no difference
        return {**fields, **({"activation": ACTIVATIONS[fields["activation"]]} if "activation" in fields else {})}

    @classmethod
    def from_hf(cls, keys: ConfigJson) -> Self:
        """The config that a config.json describes.

        Raises:
            UserError: this program does not support the model; names the key.
        """
        raise NotImplementedError

    def to_hf(self) -> dict[str, Any]:
        """The keys that the family writes to config.json.

        Raises:
            UserError: HF_ARCHITECTURE cannot compute this model.
        """
        raise NotImplementedError

    def refuse_hf(self, reasons: list[str], instead: str, *, any_d_head: bool = False) -> None:
        """Refuse the Hugging Face format for these reasons, or for a d_head that is not d_model / n_heads, unless it
        has `any_d_head`.

        Raises:
            UserError: there is a reason; `instead` names the formats that can hold the model.
        """
        if self.n_heads * self.d_head != self.d_model and not any_d_head:
            width = f"model.n_heads {self.n_heads} x model.d_head {self.d_head} is not model.d_model {self.d_model}"
            reasons = [*reasons, f"{width}, which {self.HF_ARCHITECTURE} requires"]
        if reasons:
            raise UserError(
                f"the Hugging Face format cannot hold this model: {'; '.join(reasons)}. Use the {instead} format"
            )

    @staticmethod
    def activation_from_hf(value: Any, key: str) -> ActivationName:
        """The activation that a value of `key` names.

        Raises:
            UserError: it is not known.
        """
        known = {_HF_ACTIVATIONS.get(name, str(name)): name for name in ACTIVATIONS}
        if not isinstance(value, str) or value not in known:
            raise UserError(f"{key} is {value!r:.60}: only {', '.join(known)} are supported")
        return known[value]

    @staticmethod
    def activation_to_hf(activation: ActivationName) -> str:
        """The name of an activation in config.json."""
        return _HF_ACTIVATIONS.get(activation, activation)

    def hf_unused(self, stored: Collection[str]) -> set[str]:
        """Those of the `stored` names of tensors that are not parameters."""
        return {name for name in stored if re.fullmatch(self.HF_BUFFERS, name)}

    def hf_tensors(self) -> list[Tensor]:
        """The rows for the Hugging Face format, in the order in which the model uses the parameters."""
        raise NotImplementedError

    def classic_tensors(self) -> list[Tensor]:
        """The rows for the classic format, that of the original program.

        Raises:
            UserError: the format cannot hold this model.
        """
        raise UserError(
            f"the classic format cannot hold model.family {self.family}: use the native or the Hugging Face format"
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
