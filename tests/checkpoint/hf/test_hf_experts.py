"""Folders of models with experts: slices, what a process reads, layers with other modules, config.json."""

import json
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from support import families, hf_models
from support import hf_folders as hf
from support.builders import TINY, program

from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.source import HFSource, open_tensors
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.load import load, load_by_layer
from mesh_transformer.errors import UserError
from mesh_transformer.families import mixtral, olmoe, qwen2_moe, qwen3_moe

# layers 0 and 2 are dense, 1 and 3 have 6 experts of 64 x 40
ALTERNATING = qwen2_moe.Qwen2MoeConfig(**families.MODELS["qwen2_moe"])
GATE = "params/blocks/ff/experts/gate"
EXPERT_BYTES = 64 * 40 * 4


@pytest.fixture
def params() -> Any:
    return hf.random_params(ALTERNATING)


def test_index_i_of_a_parameter_is_layer_i_of_those_that_have_it(tmp_path, params) -> None:
    write_hf(hf.MemorySource(params), ALTERNATING, str(tmp_path))
    stored = open_tensors(str(tmp_path))

    def matrix(name: str) -> np.ndarray:
        return stored[f"model.layers.{name}.weight"].read((hf.ALL, hf.ALL)).T

    for index, layer in enumerate((1, 3)):
        for expert in range(6):
            found = matrix(f"{layer}.mlp.experts.{expert}.down_proj")
            np.testing.assert_array_equal(found, params["blocks"]["ff/experts"]["out"][index, expert])
        np.testing.assert_array_equal(matrix(f"{layer}.mlp.gate"), params["blocks"]["ff/router"]["w"][index])
        np.testing.assert_array_equal(matrix(f"{layer - 1}.mlp.up_proj"), params["blocks"]["ff/in"]["w"][index])
    assert not any(name.startswith(("model.layers.0.mlp.experts", "model.layers.1.mlp.up")) for name in stored)


def test_slices_equal_parts_of_the_whole(tmp_path, params) -> None:
    write_hf(hf.MemorySource(params), ALTERNATING, str(tmp_path))
    source, random = HFSource(str(tmp_path), ALTERNATING), np.random.default_rng(0)
    whole = hf.read_all(hf.MemorySource(params))
    assert source.tensors.keys() == whole.keys()
    for name, array in whole.items():
        index = tuple(slice(*sorted(map(int, random.integers(0, size + 1, 2)))) for size in array.shape)
        np.testing.assert_array_equal(source.read(name, index), array[index], err_msg=f"{name} {index}")


def test_a_slice_reads_only_its_experts(gcs, params) -> None:
    write_hf(hf.MemorySource(params), ALTERNATING, "gs://bucket/hf")
    source = HFSource("gs://bucket/hf")
    before = gcs.bytes_read
    found = source.read(GATE, (slice(1, 2), slice(2, 4), hf.ALL, hf.ALL))
    np.testing.assert_array_equal(found, params["blocks"]["ff/experts"]["gate"][1:2, 2:4])
    assert gcs.bytes_read - before == 2 * EXPERT_BYTES


def test_a_mesh_that_splits_experts_reads_each_tensor_once(gcs, params) -> None:
    write_hf(hf.MemorySource(params), ALTERNATING, "gs://bucket/hf")
    run = program({**TINY, "model": families.MODELS["qwen2_moe"]}, "mesh.ep=2", devices=2)
    abstract = run.placement.abstract(np.dtype(np.float32))
    experts = abstract["blocks"]["ff/experts"]["gate"]
    assert experts.sharding.shard_shape(experts.shape) == (2, 3, 64, 40)
    stored = open_tensors("gs://bucket/hf").values()
    source = HFSource("gs://bucket/hf")
    before = gcs.bytes_read
    found = load(source, {"params": abstract})["params"]
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert gcs.bytes_read - before == sum(tensor.n_bytes for tensor in stored)


@pytest.mark.parametrize("limit", [64 * 40 * 4, 1000])
def test_a_large_stack_is_read_by_layers_and_experts(monkeypatch, params, limit) -> None:
    """Blocks of one expert, and then of a part of its matrix."""
    monkeypatch.setattr("mesh_transformer.checkpoint.load.BLOCK_BYTES", limit)
    run = program({**TINY, "model": families.MODELS["qwen2_moe"]}, "mesh.tp=1")
    source = hf.MemorySource(params)
    found = load(source, {"params": run.placement.abstract(np.dtype(np.float32))})["params"]
    jax.tree.map(np.testing.assert_array_equal, found, params)
    assert max(source.read_bytes) <= limit


def test_layers_are_loaded_with_their_own_modules(params) -> None:
    run = program({**TINY, "model": families.MODELS["qwen2_moe"]}, "mesh.tp=1")
    abstract = run.placement.abstract(np.dtype(np.float32))
    parts = list(load_by_layer(hf.MemorySource(params), abstract, run.model.rows_by_layer))
    assert [stage for stage, _ in parts] == ["embed", "head", *["blocks"] * 4]
    for layer, (_, found) in enumerate(parts[2:]):
        own = set(run.model.rows_by_layer[layer])
        assert found.keys() == own
        assert ("ff/experts" in own, "ff/in" in own) == (layer in (1, 3), layer in (0, 2))
        for name, leaves in found.items():
            stacked, row = (
                params["blocks"][name],
                layer if name.startswith(("attention", "norm", "ff_norm")) else layer // 2,
            )
            jax.tree.map(lambda ours, all, row=row: np.testing.assert_array_equal(ours, all[row]), leaves, stacked)


def test_a_shard_has_no_more_tensors_than_its_header_can_name(tmp_path, monkeypatch, params) -> None:
    monkeypatch.setattr("mesh_transformer.checkpoint.hf.writer.SHARD_TENSORS", 10)
    write_hf(hf.MemorySource(params), ALTERNATING, str(tmp_path))
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert max(Counter(weight_map.values()).values()) == 10
    found = hf.read_all(HFSource(str(tmp_path)))
    jax.tree.map(np.testing.assert_array_equal, found, hf.read_all(hf.MemorySource(params)))


def test_a_missing_expert_is_refused(tmp_path, params) -> None:
    import safetensors.numpy

    write_hf(hf.MemorySource(params), ALTERNATING, str(tmp_path))
    path, name = tmp_path / "model.safetensors", "model.layers.3.mlp.experts.5.up_proj.weight"
    tensors = safetensors.numpy.load_file(path)
    del tensors[name]
    safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name} is missing"):
        HFSource(str(tmp_path))


# ---- config.json ----

_COMMON = {"architectures": ["x"], "attention_dropout": 0.0, "hidden_act": "silu", "output_router_logits": False}
# the keys of released models
RELEASED: dict[str, tuple[dict[str, Any], Any]] = {
    "Mixtral-8x7B-v0.1": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "model_type": "mixtral",
            "num_attention_heads": 32,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "router_jitter_noise": 0.1,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "vocab_size": 32000,
        },
        mixtral.MixtralConfig(
            layers=32,
            d_model=4096,
            n_heads=32,
            n_kv_heads=8,
            d_ff=14336,
            n_vocab=32000,
            seq=32768,
            norm_eps=1e-5,
            rotary_base=1e6,
            n_experts=8,
            experts_per_token=2,
        ),
    ),
    "OLMoE-1B-7B-0924": (
        {
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "max_position_embeddings": 4096,
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 16,
            "num_key_value_heads": 16,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
            "vocab_size": 50304,
        },
        olmoe.OlmoeConfig(
            layers=16,
            d_model=2048,
            n_heads=16,
            d_ff=1024,
            n_vocab=50304,
            seq=4096,
            norm_eps=1e-5,
            n_experts=64,
            experts_per_token=8,
        ),
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "decoder_sparse_step": 1,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "max_position_embeddings": 8192,
            "max_window_layers": 21,
            "model_type": "qwen2_moe",
            "moe_intermediate_size": 1408,
            "norm_topk_prob": False,
            "num_attention_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 24,
            "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 32768,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        qwen2_moe.Qwen2MoeConfig(
            layers=24,
            d_model=2048,
            n_heads=16,
            d_ff=5632,
            n_vocab=151936,
            seq=8192,
            rotary_base=1e6,
            n_experts=60,
            experts_per_token=4,
            expert_d_ff=1408,
            shared_d_ff=5632,
        ),
    ),
    "Qwen3-30B-A3B": (
        {
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "max_window_layers": 48,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        qwen3_moe.Qwen3MoeConfig(
            layers=48,
            d_model=2048,
            n_heads=32,
            n_kv_heads=4,
            d_head=128,
            d_ff=6144,
            n_vocab=151936,
            seq=40960,
            rotary_base=1e6,
            n_experts=128,
            experts_per_token=8,
            expert_d_ff=768,
            router_normalize=True,
        ),
    ),
}
QWEN3 = {**_COMMON, **RELEASED["Qwen3-30B-A3B"][0]}


def read(tmp_path, values: dict[str, Any]) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_model(str(tmp_path))


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_read(tmp_path, name) -> None:
    values, expected = RELEASED[name]
    assert read(tmp_path, {**_COMMON, **values}) == expected
    assert read(tmp_path, {"model_type": values["model_type"], **expected.to_hf()}) == expected


def test_the_keys_of_qwen3_coder_are_read(tmp_path) -> None:
    found = read(tmp_path, {**QWEN3, "qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True})
    assert found == RELEASED["Qwen3-30B-A3B"][1]


def test_parameters_of_a_released_model_are_counted() -> None:
    """OLMoE: 1.3B active and 6.9B total parameters (arXiv:2409.02060)."""

    decoder = RELEASED["OLMoE-1B-7B-0924"][1].decoder()
    count = sum(one.size for one in decoder.arrays().values())
    assert round(count / 1e9, 1) == 6.9


@pytest.mark.parametrize(
    ("values", "dense"),
    [
        ({}, ()),
        ({"mlp_only_layers": [0, 2]}, (0, 2)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]}, (0, 1, 2, 4)),
    ],
)
def test_dense_layers_are_those_of_transformers(tmp_path, values, dense) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    small = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 17}
    sizes = {"num_hidden_layers": 6, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    keys = {**small, **sizes, "intermediate_size": 8, **values}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**keys))
    theirs = [number for number, layer in enumerate(model.model.layers) if not hasattr(layer.mlp, "experts")]
    found = read(tmp_path, {"model_type": "qwen3_moe", **keys})
    assert found.dense_layers == dense == tuple(theirs)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is true: layers with a sliding window are not supported"),
        ({"layer_types": [["full_attention"]]}, "layer_types is .*: only full_attention is supported"),
        ({"use_qk_norm": False}, "use_qk_norm is false: only true is supported"),
        ({"num_hidden_layers": 1 << 30}, "num_hidden_layers is 1073741824: expected a whole number from 1 to 100000"),
        ({"rope_scaling": {"type": "yarn", "mscale": "1"}}, r"mscale is '1': expected a number from 0 to 1e\+30"),
        ({"rope_scaling": {"type": "yarn", "mscale": 1, "mscale_all_dim": 1}}, "yarn needs model.rotary_factor"),
        ({"mlp_only_layers": 3}, "mlp_only_layers is 3: expected a list of layers"),
        ({"mlp_only_layers": ["3"]}, r"mlp_only_layers is \['3'\]: expected a list of layers"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected a whole number of 1 or more"),
        ({"decoder_sparse_step": 49}, "names all 48 layers, and no layer has experts"),
        ({"num_local_experts": 64}, "num_experts is 128 and num_local_experts is 64: these keys mean the same"),
        ({"num_experts_per_tok": 129}, "experts_per_token 129 exceeds model.n_experts 128"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
        ({"shared_expert_intermediate_size": 5}, "'shared_expert_intermediate_size' is 5: this key is unknown"),
    ],
)
def test_keys_that_change_the_arithmetic_are_refused(tmp_path, values, reason) -> None:
    with pytest.raises(UserError, match=f"config.json: .*{reason}"):
        read(tmp_path, {**QWEN3, **values})


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_experts_in_two_arrays_are_read(tmp_path, name: str) -> None:
    """As transformers 5 has them in memory, and saves them on request."""
    model = hf_models.save(name, tmp_path / "released")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    fused = [stored for stored in open_tensors(str(tmp_path / "fused")) if stored.endswith("experts.gate_up_proj")]
    assert fused
    expected, found = (hf.read_all(HFSource(str(tmp_path / folder))) for folder in ("released", "fused"))
    assert found.keys() == expected.keys()
    for parameter, array in expected.items():
        np.testing.assert_array_equal(found[parameter], array, err_msg=parameter)


def test_experts_without_a_byte_are_refused(tmp_path) -> None:
    """The number of experts is no bound by itself: both files say what they like."""
    hf_models.save("qwen3_moe", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 2**31 - 1, "num_local_experts": None}))
    entry = {"dtype": "F32", "shape": [2**31 - 1, 2, 0], "data_offsets": [0, 0]}
    header = json.dumps({"model.layers.0.mlp.experts.gate_up_proj": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="has shape .2147483647, 2, 0., expected"):
        HFSource(str(tmp_path))


def test_another_number_of_experts_in_an_array_is_refused(tmp_path) -> None:
    hf_models.save("qwen3_moe", tmp_path).save_pretrained(tmp_path, save_original_format=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 5, "num_local_experts": 5}))
    with pytest.raises(UserError, match=r"experts\.\w+ has shape \(6, \d+, \d+\), expected \(5, rows, columns\)"):
        HFSource(str(tmp_path))
