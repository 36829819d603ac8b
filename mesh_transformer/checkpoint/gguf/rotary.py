"""The rotary encoding that a GGUF file describes: by keys, or by tensors with a number for each frequency."""

import math
from decimal import Decimal
from typing import Any

import numpy as np

from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError
from mesh_transformer.gguf import blocks
from mesh_transformer.gguf.header import Header, decimal

FREQUENCIES = "rope_freqs.weight"
FACTORS = {length: f"rope_factors_{length}.weight" for length in ("short", "long")}
_SCALING = "rope.scaling."


def fields(keys: Any, family: Any, known: dict[str, Any]) -> dict[str, Any]:
    """The fields of the rotary encoding.

    Args:
        keys: the metadata (`model.Keys`).
        known: the fields read so far.

    Raises:
        UserError: the encoding is not supported, or tensors contradict it.
    """
    has = family.model_fields
    dims = {"rotary_dims": _head_dims(known)} if "rotary_dims" in has and "rotary_dims" not in known else {}
    factor = keys.number(f"{_SCALING}factor") or keys.number("rope.scale_linear") or 1
    # as llama.cpp assumes it, if a file has a factor and no type
    kind = keys.get(f"{_SCALING}type", str, "none" if factor == 1 else "linear")
    if keys.get(f"{_SCALING}finetuned", bool, True) is not True and family.HF_MODEL_TYPE == "granite":
        raise UserError("rope.scaling.finetuned is false, a Granite without rotary encoding: it is not supported")
    if (keys.number(f"{_SCALING}yarn_ext_factor") or 1) != 1:
        raise UserError("rope.scaling.yarn_ext_factor is not 1: it is not supported")
    if "rotary_scaling" not in has:
        if kind != "none" and factor != 1:
            raise UserError(f"rope.scaling.type is {short(kind)} with the factor {factor}: this family has none")
        return dims
    return {**dims, **_scaling(keys, known, kind, factor)}


def _head_dims(known: dict[str, Any]) -> int:
    """The width of a head."""
    return int(known.get("d_head") or known["d_model"] // max(1, known["n_heads"]))


def _scaling(keys: Any, known: dict[str, Any], kind: str, factor: float) -> dict[str, Any]:
    tensors, original = keys.header.tensors, keys.number(f"{_SCALING}original_context_length")
    attention = keys.number(f"{_SCALING}yarn_attn_factor") or keys.number(f"{_SCALING}attn_factor")
    if FREQUENCIES in tensors:
        return _llama3(keys.header, known["rotary_base"], known.get("rotary_dims") or _head_dims(known))
    if FACTORS["long"] in tensors:
        numbers = {
            f"rotary_{length}_factors": tuple(map(decimal, _vector(keys.header, name).tolist()))
            for length, name in FACTORS.items()
        }
        others = {"rotary_original_seq": original, "rotary_attention_factor": attention}
        return {"rotary_scaling": "longrope", **numbers, **others}
    if kind == "yarn":
        betas = {f"rotary_beta_{name}": keys.number(f"{_SCALING}yarn_beta_{name}") for name in ("fast", "slow")}
        others = {"rotary_original_seq": original, "rotary_attention_factor": attention, **betas}
        given = {name: value for name, value in others.items() if value is not None}
        return {"rotary_scaling": "yarn", "rotary_factor": factor, **given, **_mscales(keys)}
    if kind not in ("none", "linear"):
        raise UserError(f"rope.scaling.type is {short(kind)}: only none, linear, yarn and longrope are supported")
    if (attention or 1) != 1:
        raise UserError(f"rope.scaling.attn_factor is {attention}, and the type is {short(kind)}: expected 1")
    return {} if kind == "none" or factor == 1 else {"rotary_scaling": "linear", "rotary_factor": factor}


def _mscales(keys: Any) -> dict[str, Any]:
    """DeepSeek's magnitudes: a file has a tenth of mscale_all_dim, which equals mscale in released models."""
    multiplier = keys.number(f"{_SCALING}yarn_log_multiplier")
    if multiplier is None:
        return {}
    mscale = float(10 * Decimal(str(multiplier)))
    return {"rotary_mscale": mscale, "rotary_mscale_all_dims": mscale}


def _llama3(header: Header, base: float, dims: int) -> dict[str, Any]:
    """The constants of Llama 3's rule, of which a file has only the results: a divisor of each frequency.

    Between its ends the rule is a line: (factor / divisor - 1) / (factor - 1) = (original / wavelength - low) / (high -
    low). Three constants make a line of two, so `low` is 1, as in all released models.

    Raises:
        UserError: the numbers are none of this rule.
    """
    divisors = _vector(header, FREQUENCIES)
    if 2 * len(divisors) != dims or divisors.min() < 1 - 1e-5 or base <= 1:
        raise UserError(f"{FREQUENCIES} has {len(divisors)} numbers: expected {dims // 2} of at least 1")
    factor = float(divisors.max())
    inverse = base ** (-np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)
    inner = (divisors > 1 + 1e-5) & (divisors < factor * (1 - 1e-5))
    high, original = 4.0, 8192
    if factor > 1 and not _fits(divisors, inverse, factor, high, original) and inner.sum() > 1:
        slope, start = np.polyfit(inverse[inner], (factor / divisors[inner] - 1) / (factor - 1), 1)
        high = float(f"{1 - 1 / start:.4g}") if start < 0 else high
        original = round(slope * (high - 1))
    if factor <= 1 or high <= 1 or not _fits(divisors, inverse, factor, high, original):
        raise UserError(f"{FREQUENCIES} has other numbers than Llama 3's rule with low_freq_factor 1 gives")
    return {
        "rotary_scaling": "llama3", "rotary_factor": decimal(factor), "rotary_low_freq_factor": 1.0,
        "rotary_high_freq_factor": high, "rotary_original_seq": original,
    }  # fmt: skip


def _fits(divisors: np.ndarray, inverse: np.ndarray, factor: float, high: float, original: int) -> bool:
    smooth = np.clip((original * inverse - 1) / (high - 1), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    return bool((np.abs(divisors / expected - 1) < 1e-4).all())


def _vector(header: Header, name: str) -> np.ndarray:
    """A tensor of one dimension, finite numbers in float64."""
    tensor = header.tensors.get(name)
    if tensor is None or len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise UserError(f"{name} is missing, or is no list of numbers")
    numbers = np.empty((1, tensor.shape[0]), blocks.dtype_of(tensor.kind))
    blocks.read_rows(tensor, 0, numbers)
    if not np.isfinite(numbers).all():
        raise UserError(f"{name} has a number that is not finite")
    return numbers[0].astype(np.float64)
