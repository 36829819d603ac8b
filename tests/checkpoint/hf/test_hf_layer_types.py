"""Keys of config.json by which layers differ: windows, rotary encodings and their absence, the rotated part."""

from typing import Any

import pytest

from mesh_transformer.checkpoint.hf.config import parse_model
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


# ---- rotary encodings by type of layer ----


def bases(model: Any) -> list[Any]:
    """The base of each layer's rotary encoding."""
    return [layer.attention.positions.base for layer in model.decoder().layers]


def scalings(model: Any) -> list[str | None]:
    found = (layer.attention.positions.scaling for layer in model.decoder().layers)
    return [scaling and scaling.kind for scaling in found]


LINEAR = {"rope_type": "linear", "factor": 8.0}
LONG = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("keys", "local", "full", "scaling"),
    [
        ({}, 1e4, 1e6, None),
        ({"rope_theta": 5e5, "rope_local_base_freq": 3e3}, 3e3, 5e5, None),
        # of transformers before 5
        ({"rope_theta": 5e5, "rope_scaling": LINEAR}, 1e4, 5e5, "linear"),
        ({"rope_parameters": {FULL: {**LINEAR, "rope_theta": 5e5}, SLIDING: {"rope_theta": 3e3}}}, 3e3, 5e5, "linear"),
        ({"rope_parameters": {FULL: {"rope_theta": 5e5}, SLIDING: None}}, 1e4, 5e5, None),
    ],
)
def test_rotary_encodings_by_type_of_layer(keys, local, full, scaling) -> None:
    """Scaling changes the layers without a window only."""
    model = read("gemma3_text", sliding_window_pattern=3, **keys)
    assert bases(model) == [local, local, full, local, local]
    assert scalings(model) == [None, None, scaling, None, None]
    assert model.windows() == [6, 6, None, 6, 6]
    assert written(model) == model


def test_one_base_of_an_earlier_olmo3_is_that_of_all_layers() -> None:
    model = read("olmo3", rope_theta=3e3, rope_scaling=YARN)
    assert bases(model) == [3e3] * 5
    assert scalings(model) == [None, None, None, "yarn", None]
    assert written(model) == model


@pytest.mark.parametrize(
    ("model_type", "keys", "reason"),
    [
        ("olmo3", {"rope_parameters": {"rope_theta": 1e4}}, "rope_parameters is .*: expected an object for each of"),
        ("olmo3", {"rope_parameters": [1]}, r"rope_parameters is \[1\]: expected an object"),
        ("olmo3", {"rope_parameters": {FULL: 3}}, "full_attention is 3: expected an object"),
        ("olmo3", {"rope_parameters": {SLIDING: YARN}}, "rope_type of sliding_attention is 'yarn': only default"),
        ("olmo3", {"rope_local_base_freq": 1e4}, "'rope_local_base_freq' is 10000.0: this key is unknown"),
        ("gemma3_text", {"rope_local_base_freq": 0}, "rope_local_base_freq is 0: expected a number above 0"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0: expected a whole number"),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping is 30.0: only None is supported"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true: only false"),
        ("smollm3", {"no_rope_layers": [1] * 4}, "no_rope_layers has 4 entries for 5 layers: give one for each"),
        ("smollm3", {"no_rope_layers": [1, 1, 2, 1, 1]}, "no_rope_layers is .*: expected a list of 0"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: expected a whole number"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is true: only false is supported"),
        ("smollm3", {"layer_types": [SLIDING] * 5}, "layer_types is .*: only full_attention in each layer"),
        ("olmo2", {"sliding_window": None, "layer_types": [SLIDING] * 5}, "'layer_types' is .*: this key is unknown"),
        ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0: expected a number above 0"),
        ("starcoder2", {"norm_type": "rms_norm"}, "norm_type is 'rms_norm': only layer_norm is supported"),
        ("starcoder2", {"hidden_act": "silu"}, "hidden_act is 'silu': only gelu"),
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5: expected a number above 0 and at most"),
        ("glm4", {"partial_rotary_factor": 0.33}, "model.rotary_dims 5 must be even and at most model.d_head 16"),
        ("glm4_moe", {"n_group": 3}, "model.router_groups 3 must divide model.n_experts 128"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear"}},
            "rope_type is 'linear': only default and longrope are supported",
        ),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rotary_scaling longrope needs model.rotary_long_factors"),
        ("phi3", {"rope_scaling": {**LONG, "long_factor": [1.0]}}, "rotary_long_factors has 1 entries for .* give 8,"),
        (
            "phi3",
            {"rope_scaling": {**LONG, "short_factor": [0.0] * 8}},
            "rotary_short_factors.0: Input should be great",
        ),
        ("phi3", {"rope_scaling": {**LONG, "factor": 4.0}}, "'factor' is 4.0: this key is unknown"),
        (
            "llama",
            {"rope_scaling": {"type": "longrope"}},
            "rope_type is 'longrope': only default, linear, llama3 and ya",
        ),
        (
            "minimax_m2",
            {"rotary_dim": 8, "partial_rotary_factor": 0.25},
            "rotary_dim is 8, and partial_rotary_factor s",
        ),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1, 1]}, "attn_type_list is .*: only 1"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func is 'softmax': only sigmoid is supported"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64: only 0 is supported"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is false: only true is supported"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim is 32: only hidden_size 64 is supported"),
        ("opt", {"enable_bias": False}, "enable_bias is false: only true is supported"),
        (
            "codegen",
            {"hidden_size": 18, "num_attention_heads": 3, "rotary_dim": 4},
            "3 x model.d_head 6 must be divisi",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1: this family rotates whole heads"),
    ],
)
def test_keys_of_layers_that_differ_are_checked(model_type, keys, reason) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{reason}"):
        read(model_type, **keys)


@pytest.mark.parametrize(("seq", "factors"), [(4096, (1.0,) * 8), (4097, (2.0,) * 8)])
def test_the_context_selects_the_factors_of_longrope(seq, factors) -> None:
    """transformers selects them by the length of each call; a cache would then hold keys of both."""
    keys = {**SIZES, "max_position_embeddings": 131072, "rope_scaling": LONG}
    model = parse_model({"model_type": "phi3", **keys}, "config.json")
    # sqrt(1 + ln(32) / ln(4096))
    assert model.rotary_attention_factor == pytest.approx(1.1902380714238083)
    shorter = model.model_copy(update={"seq": seq})
    scaling = shorter.decoder().layers[0].attention.positions.scaling
    assert scaling.factors == factors
    assert scaling.attention_factor == model.rotary_attention_factor
    assert written(model) == model


def test_fields_of_other_scalings_are_refused() -> None:
    base = {"family": "phi3", "layers": 2, "d_model": 64, "n_heads": 4, "n_vocab": 99}
    with pytest.raises(UserError, match="model.rotary_factor has no effect with model.rotary_scaling none: remove it$"):
        parse_config({"model": {**base, "rotary_factor": 2.0}})
    with pytest.raises(UserError, match="rotary_scaling"):
        parse_config({"model": {**base, "rotary_scaling": "yarn", "rotary_factor": 2.0}})


# ---- layers without rotary encoding, and parts of heads ----


@pytest.mark.parametrize(
    ("keys", "rotated", "every"),
    [
        ({}, [1, 1, 1, 0, 1], 4),
        ({"no_rope_layer_interval": 2}, [1, 0, 1, 0, 1], 2),
        ({"no_rope_layers": [1, 0, 1, 0, 1], "no_rope_layer_interval": 4}, [1, 0, 1, 0, 1], 2),
        ({"no_rope_layers": [0, 1, 1, 0, 0]}, [0, 1, 1, 0, 0], None),
        ({"no_rope_layers": [1] * 5}, [1] * 5, None),
    ],
)
def test_layers_without_rotary_encoding(keys, rotated, every) -> None:
    model = read("smollm3", **keys)
    assert bases(model) == [2e6 if one else None for one in rotated]
    assert model.no_rotary_every == every
    assert model.to_hf()["no_rope_layers"] == rotated
    assert written(model) == model
    # layers that differ in numbers are one kind
    assert len(model.decoder().kinds) == 1


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"no_rotary_layers": [3, 1]}, r"model.no_rotary_layers \[3, 1\] must be ascending and less than model.layers"),
        ({"no_rotary_layers": [5]}, r"model.no_rotary_layers \[5\] must be ascending and less than model.layers 5"),
        ({"no_rotary_layers": [1], "no_rotary_every": 2}, "model.no_rotary_every has no effect with model.no_rotary_l"),
    ],
)
def test_numbers_of_layers_are_checked(fields, reason) -> None:
    base = {"family": "smollm3", "layers": 5, "d_model": 64, "n_heads": 4, "n_vocab": 99}
    with pytest.raises(UserError, match=reason):
        parse_config({"model": {**base, **fields}})


@pytest.mark.parametrize(("dims", "d_head"), [(6, 14), (62, 206), (98, 98), (2, 16)])
def test_a_part_of_a_head_is_read_and_written(dims, d_head) -> None:
    """transformers rounds the product of part and width down."""
    base = {"family": "glm4", "layers": 2, "d_model": 64, "n_heads": 4, "n_vocab": 99}
    model = parse_config({"model": {**base, "d_head": d_head, "rotary_dims": dims}}).model
    assert written(model).rotary_dims == dims
    # top-level, as before transformers 5
    keys = {name: value for name, value in model.to_hf().items() if name not in ("rope_parameters", "rope_scaling")}
    assert parse_model({"model_type": "glm4", **keys}, "config.json").rotary_dims == dims
