"""Tables of foreign tensors: each parameter has a row, and a round trip keeps every bit. Also config.json."""

import json
from typing import Any

import numpy as np
import pytest
from support import families
from support.covering import covering

from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.source import (
    export_tensor,
    foreign_shape,
    import_tensor,
    stacked_rows,
)
from mesh_transformer.checkpoint.hf.writer import config_json
from mesh_transformer.checkpoint.tensors import parameter_shapes, unpadded_shape
from mesh_transformer.config import parse_config
from mesh_transformer.errors import UserError
from mesh_transformer.families import gpt_neox, gptj
from mesh_transformer.spec import Split

SIZES: dict[str, Any] = {"layers": 2, "d_model": 30, "n_heads": 3, "d_ff": 14, "n_vocab": 17, "seq": 9}
MODELS = {
    "gptj": gptj.GptJConfig(**SIZES),
    "gpt_neox": gpt_neox.GptNeoXConfig(**SIZES),
    "gpt_neox, few": gpt_neox.GptNeoXConfig(**SIZES, attention_bias=False, tied_head=True),
}
CLASSIC = [
    gptj.GptJConfig(**{**SIZES, "d_ff": 120, "pe": pe, "norm": norm})
    for pe, norm in (("rotary", "layernorm"), ("fixed", "layernorm-nobias"), ("t5", "scalenorm-bias"))
]


@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_of_a_tensor_keep_every_bit(name) -> None:
    model, random = MODELS[name], np.random.default_rng(0)
    groups: dict[str, list[Any]] = {}
    for row in model.hf_tensors():
        groups.setdefault(row.foreign, []).append(row)
    for rows in groups.values():
        foreign = random.standard_normal(foreign_shape(rows[0], model), np.float32)
        parts = [import_tensor(row, foreign, unpadded_shape(row, model)) for row in rows]
        assert [part.shape for part in parts] == [unpadded_shape(row, model) for row in rows]
        back = export_tensor(rows[0], parts[0] if rows[0].part is None else np.stack(parts))
        np.testing.assert_array_equal(back, foreign)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_has_one_row(name) -> None:
    rows = MODELS[name].hf_tensors()
    found = [row.parameter for row in rows] + [row.bias for row in rows if row.bias]
    assert sorted(found) == sorted(parameter_shapes(MODELS[name]))


@pytest.mark.parametrize("model", CLASSIC, ids=lambda model: f"{model.pe}-{model.norm}")
def test_every_parameter_has_one_classic_row(model) -> None:
    found = [row.parameter for row in model.classic_tensors() if row.split is not Split.UNUSED]
    assert sorted(found) == sorted(parameter_shapes(model))


def test_fused_q_k_v_are_ordered_by_head() -> None:
    """The rows of the fused matrix: q, k and v of the first head, q of the second head, ..."""
    model = MODELS["gpt_neox"]
    fused = np.arange(90 * 30).reshape(90, 30)
    for part, name in enumerate("qkv"):
        row = next(row for row in model.hf_tensors() if row.parameter == f"blocks/attention/{name}/w")
        parameter = import_tensor(row, fused, (30, 30))
        for head in range(3):
            first = (3 * head + part) * 10
            np.testing.assert_array_equal(parameter[:, 10 * head : 10 * head + 10], fused[first : first + 10].T)


def test_the_classic_format_supports_only_gpt_j() -> None:
    with pytest.raises(UserError, match="the classic format cannot hold model.family gpt_neox"):
        MODELS["gpt_neox"].classic_tensors()


# ---- config.json ----


WIDTHS = {"even": {"d_model": 64, "d_head": 10}, "odd": {"d_model": 66, "d_head": 10}}


EXPORTED = [name for name, model in families.MODELS.items() if model["family"] in families.OF_TRANSFORMERS]


@pytest.mark.parametrize(("name", "width"), covering([*EXPORTED, "gptj"], WIDTHS))
def test_an_export_is_refused_where_transformers_refuses_it(name, width) -> None:
    """8 heads of 10 dims are not d_model; 66 is no multiple of 8."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    values: dict[str, Any] = {"n_heads": 8, "layers": 4, "n_vocab": 40, **WIDTHS[width]}
    base = families.MODELS.get(name, {"family": "gptj", "seq": 9})
    if "kv_rank" in base:
        # DeepseekV2Attention fails for heads of an odd width
        values |= {"nope_dims": 12, "d_head": 12 + base["rotary_dims"], "shared_d_ff": 80}
    model = parse_config({"model": {**base, **values}}).model
    # the keys that to_hf() writes, without its verdict
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "refuse_hf", lambda *args, **kwargs: None)
        keys = config_json(model, np.dtype(np.float32))
    reason = None
    try:
        config = transformers.AutoConfig.for_model(**keys, attn_implementation="eager")
        theirs = transformers.AutoModelForCausalLM.from_config(config)
        theirs.set_experts_implementation("eager")
        theirs(torch.tensor([[1, 2, 3]]))
        stored = {key: tuple(tensor.shape) for key, tensor in theirs.state_dict().items()}
        # a config class may ignore head_dim
        rows = [row for row in stacked_rows(model) if "/attention" in row.parameter]
        if any(stored[row.name((0,))] != foreign_shape(row, model) for row in rows):
            reason = "other shapes"
    except (ValueError, RuntimeError, StrictDataclassError) as error:
        reason = str(error)
    if reason is None:
        model.to_hf()
    else:
        with pytest.raises(UserError, match=r"model\.d_model"):
            model.to_hf()


def read(tmp_path, values: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_model(str(tmp_path))


# as released: written by an older transformers, with keys that nothing reads
GPTJ_6B = json.loads(
    """{"activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0,
    "bos_token_id": 50256, "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": false,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16,
    "n_inner": null, "n_layer": 28, "n_positions": 2048, "resid_pdrop": 0.0, "rotary": true, "rotary_dim": 64,
    "scale_attn_weights": true, "summary_activation": null, "summary_first_dropout": 0.1,
    "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true, "task_specific_params":
    {"text-generation": {"do_sample": true, "max_length": 50, "temperature": 1.0}}, "tie_word_embeddings": false,
    "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0", "use_cache": true,
    "vocab_size": 50400}"""
)
PYTHIA = json.loads(
    """{"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "hidden_size": 512, "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 8, "num_hidden_layers": 6,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": true, "use_parallel_residual": true, "vocab_size": 50304}"""
)
NEOX_20B = {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0, "hidden_act": "gelu_fast"}


def test_released_configs_are_read(tmp_path) -> None:
    assert read(tmp_path, GPTJ_6B) == gptj.GptJConfig(
        layers=28, d_model=4096, n_heads=16, n_vocab=50400, seq=2048, pe_rotary_dims=64
    )
    pythia = gpt_neox.GptNeoXConfig(layers=6, d_model=512, n_heads=8, n_vocab=50304, rotary_dims=16)
    assert read(tmp_path, PYTHIA) == pythia
    assert read(tmp_path, {**PYTHIA, **NEOX_20B}) == pythia.model_copy(update={"activation": "gelu_fast"})


@pytest.mark.parametrize("name", ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"])
def test_an_export_has_the_activation_of_its_origin(tmp_path, name) -> None:
    """transformers has several names for the approximation by tanh. They are one architecture."""
    model = read(tmp_path, {**PYTHIA, "hidden_act": name})
    assert model.to_hf()["hidden_act"] == name
    tanh = model.model_copy(update={"activation": "gelu_tanh"})
    assert (model.architecture() == tanh.architecture()) == (name not in ("gelu", "relu"))


@pytest.mark.parametrize("diff", [True, False])
@pytest.mark.parametrize("name", ["GPTJConfig", "GPTNeoXConfig"])
def test_configs_of_the_current_transformers_are_read(tmp_path, name, diff) -> None:
    import transformers

    config = getattr(transformers, name)(architectures=["x"], dtype="float16")
    found = read(tmp_path, json.loads(config.to_json_string(use_diff=diff)))
    sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.vocab_size
    assert (found.layers, found.d_model, found.n_heads, found.n_vocab) == sizes


def test_rotary_keys_of_all_versions_are_equivalent(tmp_path) -> None:
    base = {name: value for name, value in PYTHIA.items() if not name.startswith("rotary")}
    older = {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": None}
    both = {**older, "partial_rotary_factor": 0.5, "rope_theta": 500.0}  # transformers 4.45
    newer = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 500.0}}
    found = [read(tmp_path, {**base, **keys}) for keys in (older, both, newer)]
    assert found[0] == found[1] == found[2]
    assert (found[0].rotary_dims, found[0].rotary_base) == (32, 500.0)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"parallel_residual": False, "activation": "gelu_tanh", "norm_eps": 1e-3, "rotary_base": 500.0},
        {"attention_bias": False, "tied_head": True, "d_ff": 14},
        *({"d_model": 3 * d_head, "rotary_dims": dims} for d_head, dims in ((14, 6), (98, 2), (206, 62))),
    ],
)
def test_gpt_neox_round_trip(tmp_path, values) -> None:
    model = gpt_neox.GptNeoXConfig(**{**SIZES, **values})
    found = read(tmp_path, {"model_type": "gpt_neox", **model.to_hf()})
    assert found == model
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tmp_path)
    part = config.rope_parameters["partial_rotary_factor"]
    assert int(config.hidden_size // config.num_attention_heads * part) == model.rotary_dims
    assert config.rope_parameters["rope_theta"] == model.rotary_base


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"clip_qkv": 8.0}, "'clip_qkv' is 8.0: this key is unknown"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear': only default"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn': only default"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]: expected an object"),
        ({"rotary_pct": 0.25, "partial_rotary_factor": 0.5}, "rotary_pct is 0.25 and .* mean the same"),
        ({"rotary_pct": 0.001}, "rotary_dims: Input should be greater than or equal to 1"),
        ({"rotary_pct": "x"}, "partial_rotary_factor is 'x': expected a number above 0"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu': only gelu, "),
        ({"hidden_act": ["gelu"]}, "only gelu, "),
        ({"attention_bias": 1}, "attention_bias is 1: expected true or false"),
        ({"layer_norm_eps": -1}, "layer_norm_eps is -1: expected a number above 0"),
        ({"num_attention_heads": 7}, "d_model 512 is not divisible by model.n_heads 7"),
        ({"quantization_config": {"bits": 8}}, "quantized"),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(tmp_path, values, reason) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{reason}"):
        read(tmp_path, {**PYTHIA, **values})


def test_disabled_features_are_ignored(tmp_path) -> None:
    disabled = {
        "clip_qkv": None,
        "use_bidirectional_attention": False,
        "pruned_heads": {},
        "quantization_config": None,
    }
    assert read(tmp_path, {**PYTHIA, **disabled}) == read(tmp_path, PYTHIA)
