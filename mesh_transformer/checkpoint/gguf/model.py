"""The model that the metadata of a GGUF file describe."""

import re
from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
from pydantic import ValidationError

from mesh_transformer.checkpoint.gguf import rotary
from mesh_transformer.config import ModelConfig
from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError, listed
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.gguf_rows import COMMON, Gguf
from mesh_transformer.gguf.header import Header, decimal

# keys that change nothing that a model computes here, or that `_checked` compares
_OTHERS = re.compile(
    r"vocab_size|attention\.(causal|(key|value)_length(_mla)?|sliding_window_pattern)|expert_shared_count|"
    r"leading_dense_block_count|expert_gating_func|nextn_predict_layers|tensor_data_layout|rope\.scale_linear|"
    r"rope\.scaling\.(type|factor|original_context_length|attn_factor|finetuned|yarn_log_multiplier|"
    r"yarn_(ext_factor|attn_factor|beta_fast|beta_slow))"
)
# what a file must say; a norm's epsilon has two keys
_REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
# fields that say whether a model has a tensor, and the tensor
_PRESENT = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias", "blk.0.attn_kv_a_mqa.bias"),
    "attention_out_bias": ("blk.0.attn_output.bias",),
    "ff_bias": ("blk.0.ffn_up.bias",),
    "bias": ("blk.0.attn_q.bias",),
    "qk_norm": ("blk.0.attn_q_norm.weight",),
}
# a cap or a window of 0 is none
_ZERO_IS_NONE = {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping", "attention.scale"}
_KINDS = {True: "sliding_attention", False: "full_attention"}

T = TypeVar("T")


class Keys:
    """The metadata of a model, by the keys without the architecture."""

    def __init__(self, header: Header, architecture: str):
        self.header, self._prefix = header, f"{architecture}."

    def names(self) -> list[str]:
        """The keys that the file has."""
        return [key.removeprefix(self._prefix) for key in self.header.metadata if key.startswith(self._prefix)]

    def get(self, key: str, kind: type[T], default: Any = None) -> T | Any:
        """See `Header.get`."""
        return self.header.get(self._prefix + key, kind, default)

    def number(self, key: str) -> Any:
        """A number. A list with one value for each layer is this value; None: the file does not have the key.

        Raises:
            UserError: it is none, or layers differ.
        """
        value = self.header.metadata.get(self._prefix + key)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                raise UserError(f"{key} differs between layers: {short(value[:9].tolist())}")
            value = value[0].item()
        if value is not None and not isinstance(value, int | float):
            raise UserError(f"{key} is {short(value)}: expected a number")
        return decimal(value) if isinstance(value, float) else value


def parse_model(header: Header) -> ModelConfig:
    """The model of a file, or of the first of its parts.

    Raises:
        UserError: the architecture is not known, or the metadata do not describe a model of it.
    """
    try:
        family = _family(header)
        keys = Keys(header, family.GGUF.architecture)
        fields = dict(_fields(keys, family))
        _check_others(keys, family, fields)
        return family(**fields)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"{header.path}: its metadata describe no model: {reasons}"[:500]) from error
    except UserError as error:
        raise UserError(f"{header.path}: {str(error).removeprefix(f'{header.path}: ')}") from error


def row_of(model: ModelConfig) -> Gguf:
    """The row of the model's family."""
    row = model.GGUF
    assert row is not None
    return row


def _family(header: Header) -> Any:
    kind, architecture = header.get("general.type", str, "model"), header.get("general.architecture", str)
    if kind != "model":
        hints = {"adapter": "merge it into its model with llama.cpp's export-lora", "mmproj": "give the text model"}
        advice = hints.get(kind, "give a model")
        raise UserError(f"it holds no whole model, its general.type is {short(kind)}: {advice}")
    if not header.tensors:
        raise UserError("it holds a vocabulary and no weights: give the file of the whole model")
    rows = {family: family.GGUF for family in FAMILIES.values() if family.GGUF is not None}
    for family in sorted(rows, key=lambda family: rows[family].needs is None):
        if rows[family].architecture == architecture and _has_needs(header, rows[family]):
            return family
    known = sorted({row.architecture for row in rows.values()})
    raise UserError(f"general.architecture is {short(architecture)}: only {listed(known, most=99)} can be read")


def _has_needs(header: Header, row: Gguf) -> bool:
    if row.needs is None or header.metadata.get(f"{row.architecture}.{row.needs}") not in (None, 0):
        return True
    return any(name.endswith(f".{row.needs}") for name in header.tensors)


def _fields(keys: Keys, family: Any) -> Iterator[tuple[str, Any]]:
    row, has = family.GGUF, family.model_fields
    _check_required(keys, row)
    names = {**COMMON, **row.fields}
    # as llama.cpp assumes it, whatever the family's config.json leaves out
    fields: dict[str, Any] = {name: value for name, value in {"rotary_base": 10000.0}.items() if name in has}
    fields |= row.assumed
    for key in keys.names():
        name = names.get(key, "")
        if name in has:
            value = keys.number(key)
            fields[name] = None if value == 0 and key in _ZERO_IS_NONE else value
        elif not name and not _OTHERS.fullmatch(key):
            value = keys.header.metadata[f"{row.architecture}.{key}"]
            raise UserError(f"{row.architecture}.{key} is {short(value)}: this key is unknown and may change the model")
    fields["layers"] = _layers(keys)
    if "n_kv_heads" in has:
        fields.setdefault("n_kv_heads", fields["n_heads"])
    if row.wide_queries == fields["layers"]:
        fields["query_scale_dims"] = fields["d_model"] // max(1, fields["n_heads"])
    if "nope_dims" in has:
        fields |= _latent(keys, fields)
    fields |= _of_tensors(keys, family)
    fields |= _of_layers(keys, family, fields)
    fields |= rotary.fields(keys, family, fields)
    # an attention.scale of 0 is the usual one
    return ((name, value) for name, value in fields.items() if value is not None or has[name].default is None)


def _check_required(keys: Keys, row: Gguf) -> None:
    given = set(keys.names())
    missing = [key for key in (*_REQUIRED, *row.required) if key not in given]
    if not given & set(_EPSILONS):
        missing.append(" or ".join(_EPSILONS))
    if missing:
        raise UserError(f"its metadata have no {listed(missing)} of {row.architecture}: it holds no whole model")


def _layers(keys: Keys) -> int:
    """The number of layers without those that predict later tokens, which stand behind the others."""
    count, later = keys.get("block_count", int), keys.get("nextn_predict_layers", int, 0)
    stored = {int(match[1]) for name in keys.header.tensors if (match := re.match(r"blk\.(\d{1,6})\.", name))}
    # before anything is made for each layer
    if not 0 <= later < count or count - later > len(stored):
        raise UserError(f"block_count is {count}, and it has tensors of {len(stored)} layers: the file is damaged")
    return int(count - later)


def _latent(keys: Keys, fields: dict[str, Any]) -> dict[str, Any]:
    """The widths of latent attention. Newer files state those of the compressed heads first."""
    key, value = (
        keys.get(f"attention.{name}_length_mla", int, keys.get(f"attention.{name}_length", int))
        for name in ("key", "value")
    )
    if key is None or value is None:
        raise UserError("attention.key_length or attention.value_length is missing")
    widths = {"nope_dims": key - fields.get("rotary_dims", 0), "v_dims": value}
    return {**widths, "n_kv_heads": fields["n_heads"], "d_head": key}


def _of_tensors(keys: Keys, family: Any) -> dict[str, Any]:
    """What the names and the shapes of tensors say."""
    tensors, has = keys.header.tensors, family.model_fields
    if "token_embd.weight" not in tensors:
        raise UserError("token_embd.weight is missing: it holds no whole model, perhaps only a vocabulary")
    rows = tensors["token_embd.weight"].shape[0]
    said = keys.get("vocab_size", int, rows)
    if said != rows:
        raise UserError(f"vocab_size is {said}, and token_embd.weight has {rows} rows")
    present = {field: any(name in tensors for name in names) for field, names in _PRESENT.items() if field in has}
    tied = {"tied_head": "output.weight" not in tensors} if "tied_head" in has else {}
    return {"n_vocab": rows, **tied, **present}


def _of_layers(keys: Keys, family: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """What differs between layers: windows, and layers without experts."""
    has, layers, made = family.model_fields, fields["layers"], dict[str, Any]()
    if "dense_layers" in has:
        dense = keys.get("leading_dense_block_count", int, 0)
        if not 0 <= dense <= layers:
            raise UserError(f"leading_dense_block_count is {dense}, of {layers} layers")
        made["dense_layers"] = tuple(range(dense))
    if "expert_d_ff" in has and "expert_d_ff" not in fields:
        # older files of Qwen2-MoE
        made["expert_d_ff"] = fields["d_ff"] // max(1, fields.get("experts_per_token") or 1)
    if "shared_d_ff" in has and "shared_d_ff" not in fields:
        shared = keys.get("expert_shared_count", int)
        expert = {**made, **fields}["expert_d_ff"]
        made["shared_d_ff"] = fields["d_ff"] if shared is None else shared * expert
    pattern = keys.header.metadata.get(f"{family.GGUF.architecture}.attention.sliding_window_pattern")
    if pattern is None or "layer_types" not in has:
        return made
    if isinstance(pattern, int) and not isinstance(pattern, bool):
        return {**made, "full_every": pattern}
    if not isinstance(pattern, np.ndarray) or pattern.dtype.kind not in "biu" or len(pattern) != layers:
        raise UserError(f"attention.sliding_window_pattern is {short(pattern)}: expected a value for each layer")
    full = [number + 1 for number, windowed in enumerate(pattern) if not windowed]
    period = full[0] if full else layers + 1
    if full == list(range(period, layers + 1, period)):
        return {**made, "full_every": period}
    return {**made, "layer_types": tuple(_KINDS[bool(windowed)] for windowed in pattern)}


def _check_others(keys: Keys, family: Any, fields: dict[str, Any]) -> None:
    """Refuse keys of fields that the family does not have, unless their value changes nothing."""
    d_head = fields.get("d_head") or fields["d_model"] // max(1, fields["n_heads"])
    expected = {
        "rope.dimension_count": d_head, "attention.key_length": d_head, "attention.head_count_kv": fields["n_heads"],
        "rope.freq_base": 10000.0, "rope.freq_base_swa": fields.get("rotary_base"),
        "expert_feed_forward_length": fields["d_ff"], "expert_group_count": 1, "expert_group_used_count": 1,
        "expert_weights_scale": 1.0,
    }  # fmt: skip
    names = {**COMMON, **family.GGUF.fields}
    for key in keys.names():
        if key not in COMMON or names[key] in family.model_fields or key in family.GGUF.fields:
            continue
        value = keys.number(key)
        if value not in (expected.get(key), 0):
            raise UserError(f"{key} is {value}: a model of {family.HF_MODEL_TYPE} has {expected.get(key, 0)}")
    length = keys.number("attention.value_length")
    if length not in (None, d_head) and "v_dims" not in family.model_fields:
        raise UserError(f"attention.value_length is {length}, and the width of a head is {d_head}")
    if keys.get("attention.causal", bool, True) is not True:
        raise UserError("attention.causal is false: only models of text from left to right are read")
    # softmax is 1, sigmoid 2
    gating = keys.get("expert_gating_func", int, 0)
    if gating not in (0, family.GGUF.gating):
        raise UserError(f"expert_gating_func is {gating}: a model of {family.HF_MODEL_TYPE} has {family.GGUF.gating}")
