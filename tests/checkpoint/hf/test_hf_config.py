"""config.json of a Hugging Face GPT-J, read and written."""

import json

import numpy as np
import pytest
from support import hf_folders as hf

from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.writer import config_json
from mesh_transformer.errors import UserError

GOOD = {"model_type": "gptj", "n_layer": 3, "n_embd": 48, "n_head": 3, "rotary_dim": 6, "vocab_size": 131}


def read(tmp_path, text):
    (tmp_path / "config.json").write_text(text if isinstance(text, str) else json.dumps(text))
    return read_model(str(tmp_path))


@pytest.mark.parametrize("values", [{}, {"d_ff": 50}, {"n_vocab": 50400}])
def test_round_trip(tmp_path, values) -> None:
    model = hf.model_config(**values)
    found = read(tmp_path, config_json(model, np.dtype(np.float32)))
    assert found == model


def test_transformers_reads_the_written_config(tmp_path) -> None:
    from transformers import AutoConfig, GenerationConfig

    model = hf.model_config(d_ff=50)
    (tmp_path / "config.json").write_text(json.dumps(config_json(model, np.dtype(np.float16), end_of_text=130)))
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "GPTJConfig"
    names = (
        "n_layer",
        "n_embd",
        "n_head",
        "n_inner",
        "vocab_size",
        "n_positions",
        "rotary_dim",
        "eos_token_id",
    )
    assert [getattr(config, name) for name in names] == [3, 48, 3, 50, 131, 24, 6, 130]
    assert str(config.dtype) == "torch.float16"
    assert not config.tie_word_embeddings
    assert GenerationConfig.from_model_config(config).eos_token_id == 130


@pytest.mark.parametrize(
    ("values", "end_of_text", "expected"),
    [({}, None, None), ({"n_vocab": 50257}, None, 50256), ({"n_vocab": 50400}, 7, 7)],
)
def test_the_end_of_text_token(values, end_of_text, expected) -> None:
    found = config_json(hf.model_config(**values), np.dtype(np.float32), end_of_text)
    assert found["eos_token_id"] == found["bos_token_id"] == expected


def test_aliases_are_read(tmp_path) -> None:
    aliases = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "rotary_dim": 8}
    found = read(tmp_path, {"model_type": "gptj", **aliases, "max_position_embeddings": 9})
    assert (found.layers, found.d_model, found.n_heads, found.d_head, found.seq) == (2, 32, 4, 8, 9)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "whisper"}, "model_type is 'whisper': only gptj"),
        ({"model_type": "llama4"}, "model_type is 'llama4': this type cannot be read; near it are llama.* all [0-9]+"),
        ({"model_type": "internlm3", "mlp_bias": True, "bias": False}, "bias false contradicts mlp_bias true"),
        ({**GOOD, "architectures": ["GPTJForSequenceClassification"]}, "its head is for sequence classification and"),
        ({"model_type": None}, "model_type is None"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06: only 1e-05"),
        ({"activation_function": "gelu"}, "activation_function is 'gelu': only the tanh gelu"),
        ({"activation_function": ["relu"]}, "only the tanh gelu"),
        ({"rotary_dim": None}, "rotary_dim is None: expected a whole number .* transformers requires one"),
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"rotary_dim": 18}, "pe_rotary_dims 18 must be even and at most model.d_head 16"),
        ({"rotary_dim": 5}, "pe_rotary_dims 5 must be even"),
        ({"n_head": 5}, "d_model 48 is not divisible by model.n_heads 5"),
        ({"n_layer": 3.0}, "n_layer is 3.0"),
        ({"n_layer": True}, "n_layer is True"),
        ({"n_layer": 2**31}, "n_layer is 2147483648"),
        ({"n_positions": 2**31 - 1}, "model.seq 2147483647 is too long .* set it to 5592405 or less"),
        ({"vocab_size": 2**31 - 1}, "n_vocab 2147483647, rounded up .* is 2147483648: at most 2147483647"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"n_inner": 0}, "n_inner is 0"),
        ({"quantization_config": {"bits": 8}}, "quantized"),
    ],
)
def test_unsupported_models_are_refused(tmp_path, values, reason) -> None:
    read(tmp_path, GOOD)
    with pytest.raises(UserError, match=f"config.json: .*{reason}"):
        read(tmp_path, {**GOOD, **values})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rotary_pct", 1e308),
        ("rotary_pct", 10**400),
        ("rotary_pct", 1.5),
        ("rotary_emb_base", 10**400),
        ("layer_norm_eps", 10**400),
        ("rope_parameters", {"partial_rotary_factor": 1e308}),
        ("num_hidden_layers", 2**31 - 1),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, name, value) -> None:
    read(tmp_path, {"model_type": "gpt_neox"})
    with pytest.raises(UserError, match="config.json: .*(number above 0|less than or equal)"):
        read(tmp_path, {"model_type": "gpt_neox", name: value})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        *(
            ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": value}, "max_window_layers is")
            for value in (None, "28", [28], 1.5, True, -1)
        ),
        ({"model_type": "qwen2", "max_window_layers": "28"}, "max_window_layers is '28': expected a whole number of 0"),
        (
            {"model_type": "gpt_neo", "num_layers": 2**31 - 1},
            "num_layers is 2147483647: expected a whole number from 1",
        ),
        ({"model_type": "llama", "head_dim": 2**31 - 2}, "model.d_head 2147483646 is too large: at most 65536 dims"),
        *(
            (
                {"model_type": "llama", "rope_theta": base, "rope_scaling": {"type": "yarn", "factor": 2.0, **turns}},
                reason,
            )
            for base, turns, reason in (
                (1, {}, "model.rotary_base 1 must be over 1 with"),
                (1e4, {"beta_fast": 5e-324}, "model.rotary_beta_fast: .* greater than or equal to"),
                (1e4, {"beta_slow": 1e308}, "model.rotary_beta_slow: .* less than or equal to"),
            )
        ),
        *(
            ({"model_type": "gpt_neo", "attention_types": types}, "attention_types is .* for 24 layers")
            for types in (
                [["", 10**30], [["global"], 24]],
                [[["global"], 10**10], [["local"], 24 - 10**10]],
                [[["global"], True], [["local"], 23]],
                [[["global"], 24.0]],
                [[["global"], None]],
            )
        ),
    ],
)
def test_values_that_are_computed_with_are_checked(tmp_path, values, reason) -> None:
    with pytest.raises(UserError, match=f"config.json: {reason}"):
        read(tmp_path, values)


@pytest.mark.parametrize("values", [{}, {"max_window_layers": None}, {"max_window_layers": 0}])
def test_layers_without_windows_need_no_number_of_them(tmp_path, values) -> None:
    """As for transformers, which reads max_window_layers only with use_sliding_window."""
    assert read(tmp_path, {"model_type": "qwen2", "use_sliding_window": False, **values}).window is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path, text) -> None:
    with pytest.raises(UserError, match="config.json"):
        read(tmp_path, text)


def test_a_large_config_is_refused(tmp_path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        # a sparse file
        file.truncate(1 << 40)
    with pytest.raises(UserError, match="is over 16777216 bytes"):
        read_model(str(tmp_path))
