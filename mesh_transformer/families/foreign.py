"""What a family says of checkpoints in other programs' forms: rows of tensors, and the keys of a config.json."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mesh_transformer.errors import UserError
from mesh_transformer.fields import INT32_MAX

TRANSPOSED = "f d -> d f"


class Split(enum.Enum):
    """How the m arrays of a classic checkpoint make up the whole one."""

    ROWS = "concatenated along the first dimension"
    COLUMNS = "concatenated along the last dimension"
    SUM = "added up: a bias added on every shard before the sum over shards"
    FIRST = "the first shard's; the others' are never used"
    MEAN = "averaged"
    UNUSED = "stored by the original and used by nothing; of the shape of `ours`, which it is not"
    COUNT = "an int32 scalar, the same in every shard"


class Tensor(NamedTuple):
    """A row: which tensor of theirs holds one of our parameters.

    A row under blocks/ stands for all layers: ours has a leading dimension of layers, they have one tensor a layer.
    Shapes are not in the table: they are those of the model's parameters.
    """

    ours: str  # below params/
    theirs: str  # with {} for the layer
    # einops, from theirs to ours, read backwards to write; with `part` it yields "part ..."
    view: str | None = None
    part: int | None = None  # where one of theirs holds several of ours: which of them
    sizes: Mapping[str, int] = {}  # that `view` needs; "part": how many
    vocab_axis: int | None = None  # the dimension of ours that is padded; theirs is not
    # one of ours that they lack: zeros where theirs is read, added to the rows to write it
    bias: str | None = None
    tied: str | None = None  # the tensor of theirs that is this one too, where config.json ties the head
    split: Split = Split.ROWS  # in classic shards

    @property
    def stacked(self) -> bool:
        """Whether ours has a leading dimension of layers."""
        return self.ours.startswith("blocks/")


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

    def number(self, *names: str, default: float) -> float:
        """A number above 0.

        Raises:
            UserError: it is something else.
        """
        value = self.take(*names, default=default)
        if type(value) not in (int, float) or value <= 0:
            raise UserError(f"{names[0]} is {value!r:.60}: expected a number above 0")
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
