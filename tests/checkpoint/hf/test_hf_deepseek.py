"""Folders of DeepSeek-V2 and V3: config.json of released models, layers that are not read, sizes, what is refused."""

import json
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from support import families
from support import hf_folders as hf

from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.source import HFSource, uniform_dtype
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.spec.flops import matrix_elements

SMALL = FAMILIES["deepseek_v3"](**families.MODELS["deepseek_v3"])
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
_COMMON = {
    "architectures": ["x"],
    "auto_map": {"AutoConfig": "x"},
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "v_head_dim": 128,
}
# the keys of released models; V3 without its quantization
LITE: dict[str, Any] = {
    **_COMMON,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **_COMMON,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


def read(tmp_path, values: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("values", "total", "active", "cache"), [(LITE, 15.7, 2.4, 31_104), (V3, 671.0, 37, 70_272)], ids=["lite", "v3"]
)
def test_released_models_have_their_sizes(tmp_path, values, total, active, cache) -> None:
    """Total and active parameters, in 1e9 (arXiv:2405.04434, 2412.19437; the active ones are published with two
    digits), and bytes of a position of the cache in bfloat16: 512 + 64 numbers a layer."""
    model = read(tmp_path, values)
    decoder = model.decoder()
    assert read(tmp_path, {"model_type": values["model_type"], **model.to_hf()}) == model
    assert round(sum(one.size for one in decoder.arrays().values()) / 1e9, 1) == total
    assert matrix_elements(decoder) / 1e9 == pytest.approx(active, rel=0.03)
    entries = decoder.attentions[0].cache_entries
    assert 2 * len(decoder.layers) * sum(entry.heads * entry.width for entry in entries) == cache


def test_the_layer_that_predicts_a_later_token_is_not_read(tmp_path) -> None:
    write_hf(hf.MemorySource(hf.random_params(SMALL)), SMALL, str(tmp_path))
    expected, path = hf.read_all(HFSource(str(tmp_path))), tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    norm = f"model.layers.{SMALL.layers}.input_layernorm.weight"
    for names, reads in ((norm,), False), ((norm, f"model.layers.{SMALL.layers}.eh_proj.weight"), True):
        added = {name: np.zeros(4, np.float32) for name in names}
        safetensors.numpy.save_file({**tensors, **added}, path, metadata={"format": "pt"})
        if not reads:
            with pytest.raises(UserError, match=f"{norm} is not a tensor of DeepseekV3ForCausalLM"):
                HFSource(str(tmp_path))
            continue
        found = hf.read_all(HFSource(str(tmp_path)))
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"norm_topk_prob": True}, "'norm_topk_prob' is True: this key is unknown"),
        ({"mlp_bias": True}, "'mlp_bias' is True: this key is unknown"),
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc': only greedy and group_limited_greedy are supported"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid': only softmax is supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2: only 1 is supported"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1: expected a whole number from 0 to 27"),
        ({"first_k_dense_replace": 27}, "names all 27 layers, and no layer has experts"),
        ({"num_key_value_heads": 8}, "n_kv_heads 8 is not model.n_heads 16"),
        ({"qk_rope_head_dim": 63}, "rotary_dims 63 must be even"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}},
            "only supported with rope_type yarn",
        ),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, "router_groups 7 must divide model.n_experts 64"),
        ({"topk_method": "group_limited_greedy", "n_group": 16}, "experts_per_token 6 exceeds the 4 experts"),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(tmp_path, values, reason) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{reason}"):
        read(tmp_path, {**LITE, **values})


def test_the_biases_of_routers_stay_float32(tmp_path) -> None:
    params = hf.random_params(SMALL)
    write_hf(hf.MemorySource(params), SMALL, str(tmp_path), dtype=np.dtype(ml_dtypes.bfloat16))
    source = HFSource(str(tmp_path))
    found = source.read("params/blocks/1/ff/router/bias", (hf.ALL, hf.ALL))
    np.testing.assert_array_equal(found, params["blocks"]["1/ff/router"]["bias"])
    assert uniform_dtype(source) == ml_dtypes.bfloat16


def test_any_number_of_experts_is_refused_soon(tmp_path) -> None:
    """The names of all would not fit in memory."""
    write_hf(hf.MemorySource(hf.random_params(SMALL)), SMALL, str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_routed_experts": 3 << 28}))
    with pytest.raises(UserError, match=f"experts.{SMALL.n_experts}.gate_proj.weight is missing"):
        HFSource(str(tmp_path))


def test_models_that_the_format_cannot_hold_are_refused() -> None:
    for values, reason in (
        ({"dense_layers": [1]}, r"dense_layers \[1\] are not the first layers"),
        ({"shared_d_ff": 50}, "shared_d_ff 50 is not a multiple of model.expert_d_ff 40"),
    ):
        with pytest.raises(UserError, match=reason):
            FAMILIES["deepseek_v3"](**{**families.MODELS["deepseek_v3"], **values}).to_hf()
