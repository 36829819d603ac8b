"""Sizes of models with a name: the layers, the width and the heads of published models."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError, did_you_mean
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.base import ModelConfig

Values = dict[str, Any]


class Shape(NamedTuple):
    """A size of a model.

    Args:
        seq: the context of a model of this size on text files, tokens. Records have a length of their own.
    """

    name: str
    layers: int
    d_model: int
    n_heads: int
    seq: int = 2048


# From configs/tiny_shakespeare.json; Pythia (Biderman et al. 2023, arXiv:2304.01373, and its models of 14M and 31M);
# GPT-3 (Brown et al. 2020, table 2.1, with the heads of configs/); GPT-J-6B; and between them, the models of Hoffmann
# et al. 2022 (table A9). The names are theirs: a model's own count depends on its vocabulary.
SHAPES = (
    Shape("tiny", 4, 128, 4, seq=128),
    Shape("14M", 6, 128, 4, seq=512),
    Shape("31M", 6, 256, 8, seq=512),
    Shape("70M", 6, 512, 8),
    Shape("74M", 10, 640, 10),
    Shape("125M", 12, 768, 12),
    Shape("251M", 16, 1024, 16),
    Shape("350M", 24, 1024, 16),
    Shape("552M", 24, 1280, 10),
    Shape("760M", 24, 1536, 16),
    Shape("1B", 23, 1792, 14),
    Shape("1.3B", 24, 2048, 16),
    Shape("2B", 28, 2304, 18),
    Shape("2.7B", 32, 2560, 32),
    Shape("4.5B", 36, 3072, 24),
    Shape("6B", 28, 4096, 16),
    Shape("9.3B", 42, 4096, 32),
    Shape("13B", 40, 5120, 40),
)
SIZES = {shape.name.lower(): shape for shape in SHAPES}
PRETRAINED = {"6b": "hf://EleutherAI/gpt-j-6b"}
"""The checkpoints that a size names in a fine-tuning. EleutherAI's copy of the original's weights."""
GPT2_VOCAB = 50400
"""The size of the vocabulary of GPT-2's tokenizer, in the config of 2021."""
SEPARATOR = ":"
# a family with routed experts has required fields that a shape lacks
DENSE = tuple(
    name
    for name, family in FAMILIES.items()
    if not {"n_experts", "experts_per_token"}
    & {key for key, field in family.model_fields.items() if field.is_required()}
)
# a gated layer has three matrices: with 8/3 of the width it has the parameters of two with 4 (Shazeer 2020,
# arXiv:2002.05202), rounded to a multiple of this
_D_FF_MULTIPLE = 128
_MOST_ROTARY_DIMS = 64


class ModelChoice(NamedTuple):
    """A model from scratch: a family, and a size or None for the size that fits the budget."""

    family: str
    shape: Shape | None


def parse(text: str) -> ModelChoice:
    """The choice that FAMILY, SIZE or FAMILY:SIZE names. A size alone is of the family gptj.

    Raises:
        UserError: the family or the size is unknown.
    """
    family, separator, size = text.strip().partition(SEPARATOR)
    if not separator and family.lower() in SIZES:
        family, size = "gptj", family
    if family not in DENSE:
        experts = " (it has experts, whose numbers no size gives: begin with configs/moe_1B_A300M.json)"
        near = did_you_mean(family, (*DENSE, *SIZES)) if family not in FAMILIES else experts
        raise UserError(
            f"model {text!r}: unknown{near}; give a family ({', '.join(DENSE)}), a "
            f"size ({', '.join(shape.name for shape in SHAPES)}), or both, such as llama{SEPARATOR}350M"
        )
    if not size:
        return ModelChoice(family, None)
    if size.lower() not in SIZES:
        near = did_you_mean(size, SIZES)
        raise UserError(f"model {text!r}: unknown size{near}; known are {', '.join(shape.name for shape in SHAPES)}")
    return ModelChoice(family, SIZES[size.lower()])


class TrainedModel(NamedTuple):
    """A model to tune: the config group `model`, and the checkpoint."""

    values: Values
    checkpoint: str


def trained(text: str) -> TrainedModel:
    """The model that a checkpoint records, or that a size names.

    Raises:
        UserError: there is no such checkpoint, or it does not record its model; or the size names no checkpoint.
    """
    size = text.strip().lower()
    if size in PRETRAINED:
        return TrainedModel(model_values("gptj", SIZES[size], GPT2_VOCAB, None), PRETRAINED[size])
    if size in SIZES:
        raise UserError(
            f"model {text}: to tune, name a checkpoint or hf://ORG/NAME; the size {' or '.join(PRETRAINED)} alone "
            "names GPT-J's"
        )
    # it reads tensors' names with JAX
    from mesh_transformer.checkpoint.open import Checkpoint
    from mesh_transformer.runtime.session.weights import recorded_model_of

    return TrainedModel(recorded_model_of(Checkpoint.open(text.strip())), text.strip())


def model_values(family: str, shape: Shape, n_vocab: int, seq: int | None) -> Values:
    """The config group `model` for a shape.

    Args:
        seq: None: the context of the shape.
    """
    values: Values = {
        "family": family,
        "layers": shape.layers,
        "d_model": shape.d_model,
        "n_heads": shape.n_heads,
        "n_vocab": n_vocab,
        "seq": seq or shape.seq,
    }
    if "pe_rotary_dims" in FAMILIES[family].model_fields:
        values["pe_rotary_dims"] = min(_MOST_ROTARY_DIMS, shape.d_model // shape.n_heads // 2)
    if _is_gated(values):
        values["d_ff"] = _D_FF_MULTIPLE * max(1, round(8 * shape.d_model / 3 / _D_FF_MULTIPLE))
    return values


def parameters(model: ModelConfig) -> int:
    """The parameters of a model, with the embedding and the rows that pad the vocabulary."""
    return sum(math.prod(array.shape) for array in model.decoder().arrays().values())


def _is_gated(values: Mapping[str, Any]) -> bool:
    layer = parse_config({"model": dict(values)}).decoder.layers[0]
    return any(getattr(mechanism, "gated", False) for mechanism in layer.mechanisms)
