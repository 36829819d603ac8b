"""The model that the metadata of a GGUF file describe."""

import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from pydantic import ValidationError

from mesh_transformer.config import ModelConfig
from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError, listed
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.gguf_rows import COMMON, Gguf
from mesh_transformer.gguf import blocks
from mesh_transformer.gguf.header import Header, StoredTensor

# keys that change nothing that a model computes here
_HARMLESS = re.compile(
    r"vocab_size|rope\.scaling\.(finetuned|yarn_log_multiplier)|attention\.(causal|key_length_mla|value_length_mla)|"
    r"expert_shared_count|leading_dense_block_count|expert_gating_func|nextn_predict_layers|interleave_moe_layer_step|"
    r"tensor_data_layout|attention\.(value_length|sliding_window_pattern|layer_indices)|rope\.scaling\..*|pooling_type"
)
# fields that say whether a model has a tensor, and the tensor
_PRESENT = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias", "blk.0.attn_kv_a_mqa.bias"),
    "attention_out_bias": ("blk.0.attn_output.bias",),
    "ff_bias": ("blk.0.ffn_up.bias",),
    "bias": ("blk.0.attn_q.bias",),
    "qk_norm": ("blk.0.attn_q_norm.weight",),
}


def parse_model(header: Header) -> ModelConfig:
    """The model of a file, or of the first of its parts.

    Raises:
        UserError: the architecture is not known, or the metadata do not describe a model of it.
    """
    try:
        family = _family(header)
        fields = dict(_fields(header, family))
        return family(**fields)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"{header.path}: its metadata describe no model: {reasons}"[:500]) from error
    except UserError as error:
        raise UserError(f"{header.path}: {error}") from error


def row_of(model: ModelConfig) -> Gguf:
    """The row of the model's family."""
    row = model.GGUF
    assert row is not None
    return row


def _family(header: Header) -> Any:
    kind, architecture = header.metadata.get("general.type", "model"), header.metadata.get("general.architecture")
    if kind != "model":
        hints = {"adapter": "merge it into its model with llama.cpp's export-lora", "mmproj": "give the text model"}
        raise UserError(
            f"it holds no whole model, its general.type is {short(kind)}: {hints.get(kind, 'give a model')}"
        )
    rows = {family: family.GGUF for family in FAMILIES.values() if family.GGUF is not None}
    for family in sorted(rows, key=lambda family: rows[family].needs is None):
        if rows[family].architecture == architecture and _has_needs(header, rows[family]):
            return family
    known = sorted({row.architecture for row in rows.values()})
    raise UserError(f"general.architecture is {short(architecture)}: only {listed(known, most=99)} can be read")


def _has_needs(header: Header, row: Gguf) -> bool:
    if row.needs is None or header.metadata.get(f"{row.architecture}.{row.needs}"):
        return True
    return any(name.endswith(f".{row.needs}") for name in header.tensors)


def _fields(header: Header, family: Any) -> Iterator[tuple[str, Any]]:
    row, has = family.GGUF, family.model_fields
    values = {
        key.removeprefix(f"{row.architecture}."): value
        for key, value in header.metadata.items()
        if key.startswith(f"{row.architecture}.")
    }
    names = {**COMMON, **row.fields}
    fields: dict[str, Any] = dict(row.assumed)
    for key, value in values.items():
        name = names.get(key, "")
        if name in has:
            fields[name] = _plain(key, value)
        elif not name and not _HARMLESS.fullmatch(key):
            raise UserError(f"{row.architecture}.{key} is {short(value)}: this key is unknown and may change the model")
    if "layers" in fields and (others := values.get("nextn_predict_layers")):
        # layers that predict later tokens stand behind the others
        fields["layers"] -= others
    if row.wide_queries is not None and fields.get("layers") == row.wide_queries:
        fields["query_scale_dims"] = fields["d_model"] // fields["n_heads"]
    if "nope_dims" in has:
        fields |= _latent(values, fields)
    fields |= _tokens(header, values, family)
    fields |= _present(header, family)
    fields |= _layers(values, family, fields)
    fields |= _rotary(header, values, family, fields)
    _check_others(values, family, fields, names)
    return iter(fields.items())


def _latent(values: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of latent attention. Newer files state those of the compressed heads first."""
    key = values.get("attention.key_length_mla", values.get("attention.key_length"))
    value = values.get("attention.value_length_mla", values.get("attention.value_length"))
    if not isinstance(key, int) or not isinstance(value, int):
        raise UserError("attention.key_length and attention.value_length are missing")
    widths = {"nope_dims": key - fields.get("rotary_dims", 0), "v_dims": value}
    return {**widths, "n_kv_heads": fields.get("n_heads"), "d_head": key}


def _plain(key: str, value: Any) -> Any:
    """A value for a field. A list with one value for each layer is this value."""
    if isinstance(value, np.ndarray):
        if len(value) == 0 or (value != value[0]).any():
            raise UserError(f"{key} differs between layers: {short(value.tolist())}")
        value = value[0].item()
    if not isinstance(value, int | float):
        raise UserError(f"{key} is {short(value)}: expected a number")
    if isinstance(value, float):
        value = _decimal(value)
    return None if key == "attention.sliding_window" and value == 0 else value


def _tokens(header: Header, values: Mapping[str, Any], family: Any) -> dict[str, Any]:
    table = _tensor(header, "token_embd.weight")
    said = values.get("vocab_size")
    if isinstance(said, int) and said != table.shape[0]:
        raise UserError(f"vocab_size is {said}, and token_embd.weight has {table.shape[0]} rows")
    # converters leave out rows behind the last token
    fields: dict[str, Any] = {"n_vocab": table.shape[0]}
    if "tied_head" in family.model_fields:
        fields["tied_head"] = "output.weight" not in header.tensors
    return fields


def _present(header: Header, family: Any) -> dict[str, bool]:
    return {
        field: any(name in header.tensors for name in names)
        for field, names in _PRESENT.items()
        if field in family.model_fields
    }


def _layers(values: Mapping[str, Any], family: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between layers: windows, and layers without experts."""
    has, layers = family.model_fields, fields.get("layers")
    made: dict[str, Any] = {}
    if not isinstance(layers, int):
        return made
    if "dense_layers" in has:
        dense = values.get("leading_dense_block_count", 0)
        made["dense_layers"] = tuple(range(min(dense, layers))) if isinstance(dense, int) else ()
    if "shared_d_ff" in has and "expert_shared_count" in values:
        made["shared_d_ff"] = values["expert_shared_count"] * fields.get("expert_d_ff", 0)
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray) and "layer_types" in has and len(pattern) == layers:
        full = [number + 1 for number, windowed in enumerate(pattern.tolist()) if not windowed]
        period = full[0] if full else layers + 1
        if full == list(range(period, layers + 1, period)):
            made["full_every"] = period
        else:
            made["layer_types"] = tuple(
                "sliding_attention" if windowed else "full_attention" for windowed in pattern.tolist()
            )
    elif isinstance(pattern, int) and "full_every" in has:
        made["full_every"] = pattern
    return made


def _rotary(header: Header, values: Mapping[str, Any], family: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """How the frequencies are lowered: by keys, or by tensors with a number for each."""
    kind = values.get("rope.scaling.type", "none")
    scaling = {name.removeprefix("rope.scaling."): value for name, value in values.items()}
    if "rotary_scaling" not in family.model_fields:
        if kind != "none":
            raise UserError(f"rope.scaling.type is {short(kind)}: this family has none")
        return {}
    taken = {
        "rotary_factor": scaling.get("factor"),
        "rotary_original_seq": scaling.get("original_context_length"),
        "rotary_beta_fast": scaling.get("yarn_beta_fast"),
        "rotary_beta_slow": scaling.get("yarn_beta_slow"),
        "rotary_attention_factor": scaling.get("yarn_attn_factor", scaling.get("attn_factor")),
    }
    plain = {name: _plain(name, value) for name, value in taken.items() if value is not None}
    factors = header.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3(factors, fields.get("rotary_base", 10000.0))
    if "rope_factors_long.weight" in header.tensors:
        numbers = {
            f"rotary_{length}_factors": tuple(map(_decimal, _vector(_tensor(header, f"rope_factors_{length}.weight"))))
            for length in ("short", "long")
        }
        wanted = ("rotary_original_seq", "rotary_attention_factor")
        return {"rotary_scaling": "longrope", **numbers, **{name: plain[name] for name in wanted if name in plain}}
    if kind == "linear" or (kind == "none" and "rope.scale_linear" in values):
        factor = plain.get("rotary_factor", values.get("rope.scale_linear"))
        return {} if factor == 1 else {"rotary_scaling": "linear", "rotary_factor": factor}
    if kind == "yarn":
        return {"rotary_scaling": "yarn", **plain, **_mscales(scaling, family)}
    if kind != "none":
        raise UserError(f"rope.scaling.type is {short(kind)}: only none, linear, yarn and longrope are supported")
    return {}


def _mscales(scaling: Mapping[str, Any], family: Any) -> dict[str, Any]:
    """DeepSeek's magnitudes: a file has a tenth of mscale_all_dim, which equals mscale in released models."""
    multiplier = scaling.get("yarn_log_multiplier")
    if multiplier is None or "rotary_mscale" not in family.model_fields:
        return {}
    mscale = float(10 * Decimal(str(np.float32(multiplier))))
    return {"rotary_mscale": mscale, "rotary_mscale_all_dims": mscale}


def _llama3(tensor: StoredTensor, base: float) -> dict[str, Any]:
    """The constants of Llama 3's rule, of which a file has only the results: a divisor of each frequency.

    Between its ends the rule is a line: (factor / divisor - 1) / (factor - 1) = (original / wavelength - low) / (high -
    low). Three constants make a line of two, so `low` is 1, as in all released models.

    Raises:
        UserError: the numbers are none of this rule.
    """
    divisors = _vector(tensor)
    pairs, factor = len(divisors), float(divisors.max())
    inverse = base ** (-np.arange(pairs) / pairs) / (2 * math.pi)
    inner = (divisors > 1 + 1e-5) & (divisors < factor * (1 - 1e-5))
    high, original = 4.0, 8192
    if factor > 1 and not _fits(divisors, inverse, factor, high, original) and inner.sum() > 1:
        slope, start = np.polyfit(inverse[inner], (factor / divisors[inner] - 1) / (factor - 1), 1)
        high = float(f"{1 - 1 / start:.4g}") if start < 0 else high
        original = round(slope * (high - 1))
    if factor <= 1 or high <= 1 or not _fits(divisors, inverse, factor, high, original):
        raise UserError(f"{tensor.name} has other numbers than Llama 3's rule with low_freq_factor 1 gives")
    return {
        "rotary_scaling": "llama3", "rotary_factor": _decimal(factor), "rotary_low_freq_factor": 1.0,
        "rotary_high_freq_factor": high, "rotary_original_seq": original,
    }  # fmt: skip


def _fits(divisors: np.ndarray, inverse: np.ndarray, factor: float, high: float, original: int) -> bool:
    smooth = np.clip((original * inverse - 1) / (high - 1), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    return bool((np.abs(divisors / expected - 1) < 1e-4).all())


def _decimal(value: float) -> float:
    """The shortest decimal that is the same float32 number: files have no wider ones."""
    return float(str(np.float32(value)))


def _check_others(values: Mapping[str, Any], family: Any, fields: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse keys of fields that the family does not have, unless their value changes nothing."""
    heads, width = fields.get("n_heads"), fields.get("d_model")
    d_head = fields.get("d_head") or (
        width // heads if isinstance(heads, int) and isinstance(width, int) and heads else 0
    )
    plain = {
        "rope.dimension_count": d_head, "attention.key_length": d_head, "attention.head_count_kv": heads,
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "expert_feed_forward_length": fields.get("d_ff"),
    }  # fmt: skip
    neutral = {
        "expert_count": 0, "expert_used_count": 0, "attention.sliding_window": 0, "expert_group_count": 1,
        "expert_group_used_count": 1, "expert_weights_scale": 1.0, "final_logit_softcapping": 0.0,
    }  # fmt: skip
    for key, value in values.items():
        name = names.get(key)
        if name is None or name in family.model_fields or key in family.GGUF.fields:
            continue
        expected = {**plain, **neutral}.get(key)
        if _plain(key, value) not in (expected, None):
            raise UserError(f"{key} is {short(value)}: a model of {family.HF_MODEL_TYPE} has {expected}")
    length = values.get("attention.value_length", d_head)
    if length != d_head and "v_dims" not in family.model_fields:
        raise UserError(f"attention.value_length is {short(length)}, and the width of a head is {d_head}")


def _tensor(header: Header, name: str) -> StoredTensor:
    if name not in header.tensors:
        raise UserError(f"{name} is missing: it holds no whole model, perhaps only a vocabulary")
    return header.tensors[name]


def _vector(tensor: StoredTensor) -> np.ndarray:
    """A tensor of one dimension, float64."""
    if len(tensor.shape) != 1 or tensor.shape[0] > 1 << 16:
        raise UserError(f"{tensor.name} has shape {tensor.shape}: expected a list of numbers")
    numbers = np.empty((1, tensor.shape[0]), blocks.dtype_of(tensor.kind))
    blocks.read_rows(tensor, 0, numbers)
    return numbers[0].astype(np.float64)
