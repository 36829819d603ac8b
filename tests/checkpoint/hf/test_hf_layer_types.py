"""Keys of config.json by which layers differ: windows, rotary encodings and their absence, the rotated part."""

from typing import Any

import pytest

from mesh_transformer.checkpoint.hf.source import parse_model
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError

SLIDING, FULL = "sliding_attention", "full_attention"
SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 5,
    "sliding_window": 6,
    "vocab_size": 99,
}


def read(model_type: str, **keys: Any) -> Any:
    return parse_model({"model_type": model_type, **SIZES, **keys}, "config.json")


def written(model: Any) -> Any:
    """What reading its own config.json gives."""
    return parse_model({"model_type": model.HF_MODEL_TYPE, **model.to_hf()}, "config.json")


@pytest.mark.parametrize(
    ("types", "windows", "every"),
    [
        (None, [6, None, 6, None, 6], 2),
        ([SLIDING, FULL, SLIDING, FULL, SLIDING], [6, None, 6, None, 6], 2),
        ([SLIDING, SLIDING, FULL, SLIDING, SLIDING], [6, 6, None, 6, 6], 3),
        ([FULL] * 5, [None] * 5, 1),
        ([SLIDING] * 5, [6] * 5, None),
        ([FULL, SLIDING, SLIDING, FULL, SLIDING], [None, 6, 6, None, 6], None),
    ],
)
def test_layer_types_are_read_and_written(types, windows, every) -> None:
    """As a number, where each so many layers the last has no window; as a list else."""
    model = read("gemma2", layer_types=types)
    assert model.windows() == windows
    assert (model.full_every, model.layer_types) == (every, None if every else tuple(types))
    assert written(model) == model
    assert model.to_hf()["layer_types"] == (types or [SLIDING, FULL, SLIDING, FULL, SLIDING])


def test_two_forms_of_one_list_are_one_architecture() -> None:
    base = {"family": "gemma2", "layers": 4, "d_model": 64, "n_heads": 4, "n_vocab": 99, "window": 6}
    number, listed, other = (
        parse_config({"model": {**base, **given}}).model
        for given in ({"full_every": 2}, {"layer_types": [SLIDING, FULL] * 2}, {"full_every": 4})
    )
    assert number.architecture() == listed.architecture() != other.architecture()


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"layer_types": [SLIDING] * 4}, "layer_types has 4 entries for 5 layers: give one for each"),
        ({"layer_types": [SLIDING] * 4 + ["chunked_attention"]}, "layer_types is .*: expected a list of sliding_att"),
        ({"layer_types": SLIDING}, "layer_types is 'sliding_attention': expected a list"),
        ({"layer_types": [[SLIDING]] * 5}, "layer_types is .*: expected a list"),
    ],
)
def test_other_layer_types_are_refused(keys, reason) -> None:
    with pytest.raises(UserError, match=f"config.json: {reason}"):
        read("gemma2", **keys)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layer_types": [FULL] * 4}, "model.layer_types has 4 entries for model.layers 5: give one for each layer"),
        ({"layer_types": [FULL] * 5, "full_every": 2}, "model.full_every has no effect with model.layer_types"),
        ({"full_every": 0}, "full_every"),
        ({"layer_types": ["full"] * 5}, "layer_types"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, reason) -> None:
    base = {"family": "gemma2", "layers": 5, "d_model": 64, "n_heads": 4, "n_vocab": 99}
    with pytest.raises(UserError, match=reason):
        parse_config({"model": {**base, **fields}})
