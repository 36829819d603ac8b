"""config.json of a Hugging Face GPT-J, to and from our ModelConfig."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import ValidationError

from mesh_transformer import files
from mesh_transformer.checkpoint.hf_layout import check_exports
from mesh_transformer.checkpoint.json_file import read_json
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.families import gptj
from mesh_transformer.fields import INT32_MAX

EPSILON = 1e-5
TANH_GELUS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # three programs of one formula
END_OF_TEXT = 50256  # GPT-2's

# their name, its alias, and the default of GPTJConfig
_SIZES = {
    "layers": ("n_layer", "num_hidden_layers", 28),
    "d_model": ("n_embd", "hidden_size", 4096),
    "n_heads": ("n_head", "num_attention_heads", 16),
    "n_vocab": ("vocab_size", "vocab_size", 50400),
    "seq": ("n_positions", "max_position_embeddings", 2048),
    "pe_rotary_dims": ("rotary_dim", "rotary_dim", 64),
}


def model_config_from_hf(folder: str) -> ModelConfig:
    """The architecture that a folder's config.json describes.

    Raises:
        UserError: config.json is missing or unreadable, or describes something other than a GPT-J that we compute.
    """
    if not files.exists(files.join(folder, "config.json")):
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json")
    raw = read_json(files.join(folder, "config.json"))
    try:
        return _to_model(raw)
    except UserError as error:
        raise UserError(f"{files.join(folder, 'config.json')}: {error}") from error


def is_tied(folder: str) -> bool:
    """Whether the table of embeddings serves as the head's matrix too, if the folder has none."""
    return read_json(files.join(folder, "config.json")).get("tie_word_embeddings") is True


def _to_model(raw: dict[str, Any]) -> ModelConfig:
    _check_kind(raw)
    values: dict[str, Any] = {ours: _size(raw, *theirs) for ours, theirs in _SIZES.items()}
    if raw.get("n_inner") is not None:
        values["d_ff"] = _size(raw, "n_inner", "n_inner", 0)
    try:
        return gptj.Config(**values)
    except ValidationError as error:
        reasons = [str(detail.get("ctx", {}).get("error", detail["msg"])) for detail in error.errors()]
        raise UserError("; ".join(reasons)) from error


def _check_kind(raw: dict[str, Any]) -> None:
    if raw.get("model_type") != "gptj":
        raise UserError(f"model_type is {raw.get('model_type')!r:.60}: only gptj is read")
    if raw.get("quantization_config"):
        raise UserError("the weights are quantized (quantization_config): save them in float first")
    activation = raw.get("activation_function", "gelu_new")
    if activation not in TANH_GELUS:
        raise UserError(
            f"activation_function is {activation!r:.60}: only the tanh gelu is computed ({', '.join(TANH_GELUS)})"
        )
    epsilon = raw.get("layer_norm_epsilon", EPSILON)
    if epsilon != EPSILON:
        raise UserError(f"layer_norm_epsilon is {epsilon!r:.60}: only {EPSILON} is computed")


def _size(raw: dict[str, Any], name: str, alias: str, default: int) -> int:
    value = raw.get(name, raw.get(alias, default))
    if type(value) is not int or not 1 <= value <= INT32_MAX:
        why = ", and transformers needs one" if name == "rotary_dim" else ""
        raise UserError(f"{name} is {value!r:.60}: expected a whole number of 1 or more{why}")
    return value


def to_hf(model: Any, dtype: np.dtype, end_of_text: int | None = None) -> dict[str, Any]:
    """The config.json of a model stored in `dtype`.

    Without `end_of_text` it is GPT-2's, or null where the vocabulary does not reach so far.

    Raises:
        UserError: the model is none that GPTJForCausalLM computes.
    """
    check_exports(model)
    return {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "vocab_size": model.n_vocab,
        "n_positions": model.seq,
        "n_embd": model.d_model,
        "n_layer": model.layers,
        "n_head": model.n_heads,
        "rotary_dim": model.pe_rotary_dims,
        "n_inner": None if model.d_ff == 4 * model.d_model else model.d_ff,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": EPSILON,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "tie_word_embeddings": False,
        **to_hf_generation(model, end_of_text),
        "dtype": str(dtype),
        "torch_dtype": str(dtype),  # its name before transformers 4.56
    }


def to_hf_generation(model: ModelConfig, end_of_text: int | None = None) -> dict[str, Any]:
    """The generation_config.json: where a text ends."""
    if end_of_text is None and model.n_vocab > END_OF_TEXT:
        end_of_text = END_OF_TEXT
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
