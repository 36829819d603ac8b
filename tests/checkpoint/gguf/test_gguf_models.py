"""GGUF files as checkpoints: the model and the tensors of each family, as in the Hugging Face folder."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support import gguf_files, gguf_models, hf_models
from support import hf_folders as hf
from support.gcs_server import GcsServer

from mesh_transformer import files
from mesh_transformer.checkpoint.gguf.model import parse_model
from mesh_transformer.checkpoint.gguf.source import GgufSource
from mesh_transformer.checkpoint.gguf.tensor import GgufTensor
from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.data.tokens.tokenizer import load_tokenizer
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.gguf.header import read_header

# llama.cpp adds one to the scales of norms in float32, and a file has float32 numbers
ROUNDED = 1e-7
KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "TQ1_0"]


def opened(path: Path) -> tuple[Any, Any]:
    """The model and the tensors of a file."""
    checkpoint = Checkpoint.open(str(path))
    assert checkpoint.model is not None
    return checkpoint.model, checkpoint.source(checkpoint.model)


@pytest.mark.parametrize("name", gguf_models.VARIANTS)
def test_a_model_of_each_family(tmp_path: Path, name: str) -> None:
    path = gguf_models.save(name, tmp_path / name)
    model, source = opened(path)
    theirs = HFSource(str(tmp_path / name))
    assert model.family == theirs.model.family
    numbers, others = _split(model.model_dump())
    expected_numbers, expected_others = _split(theirs.model.model_dump())
    assert others == expected_others
    assert numbers == pytest.approx(expected_numbers, rel=ROUNDED)
    tensors, expected = hf.read_all(source), hf.read_all(theirs)
    assert tensors.keys() == expected.keys()
    for parameter, values in expected.items():
        plus_one = name.startswith("gemma") and "norm" in parameter
        np.testing.assert_allclose(tensors[parameter], values, rtol=0, atol=2 * ROUNDED if plus_one else 0)


def test_every_family_that_llama_cpp_has_is_compared() -> None:
    compared = {hf_models.VARIANTS[name][0] for name in gguf_models.VARIANTS}
    missing = {
        name: family.HF_ARCHITECTURE
        for name, family in FAMILIES.items()
        if family.GGUF is not None and family.HF_ARCHITECTURE.removesuffix("ForCausalLM") not in compared
    }
    assert missing == {"gpt2": "GPT2LMHeadModel"}


def _split(values: dict[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """The fractional numbers, and the other values."""
    flat = {
        f"{name}.{index}": number
        for name, value in values.items()
        for index, number in enumerate(value if isinstance(value, tuple) else [value])
    }
    numbers = {name: value for name, value in flat.items() if isinstance(value, float)}
    return numbers, {name: value for name, value in flat.items() if name not in numbers}


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_rows_are_those_of_the_package(tmp_path: Path, kind: str) -> None:
    """Also rows in another order, the rows of one expert, and columns."""
    number = gguf.GGMLQuantizationType[kind]
    block, n_bytes = gguf.GGML_QUANT_SIZES[number]
    random = np.random.default_rng(0)
    # a scale must be a finite number
    codes = random.integers(0, 60, (6, 2, 2 * n_bytes), dtype=np.uint8)
    values = gguf.quants.dequantize(codes, number)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("experts", codes, raw_dtype=number)
    writer.add_tensor("rows", codes.reshape(12, -1), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    stored = read_header(str(tmp_path / "a.gguf")).tensors
    assert stored["rows"].shape == (12, 2 * block)
    experts, rows = GgufTensor.of(stored["experts"]), GgufTensor.of(stored["rows"])
    np.testing.assert_array_equal(experts.read((slice(1, 5), slice(None), slice(None))), values[1:5])
    np.testing.assert_array_equal(experts.part(4).read((slice(None), slice(3, 9))), values[4, :, 3:9])
    order = random.permutation(12)
    ordered = dataclasses.replace(rows, order=order)
    np.testing.assert_array_equal(ordered.read((slice(2, 11), slice(None))), values.reshape(12, -1)[order[2:11]])


def small(tmp_path: Path, metadata: Mapping[str, Any] = {}, tensors: Mapping[str, Any] = {}) -> Path:
    """A file of a Llama with 32 tokens, with changed metadata and tensors; None takes one away."""
    original, weights = gguf_files.llama(32, width=32)
    keys, arrays = {**original, **metadata}, {**weights, **tensors}
    return gguf_files.write(
        tmp_path / "small.gguf", "llama",
        {key: value for key, value in keys.items() if value is not None},
        {name: values for name, values in arrays.items() if values is not None},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("metadata", "tensors", "reason"),
    [
        ({"general.type": "adapter"}, {}, "its general.type is 'adapter': merge it into its model"),
        ({"general.type": "mmproj"}, {}, "its general.type is 'mmproj': give the text model"),
        ({}, {"token_embd.weight": None}, "token_embd.weight is missing: it holds no whole model"),
        ({}, {"blk.0.ffn_up.weight": None}, "mlp.up_proj.weight is missing"),
        ({}, {"blk.1.ffn_up.weight": np.ones((2, 2), np.float32)}, "blk.1.ffn_up.weight is not a tensor of llama"),
        ({}, {"blk.0.ffn_up.weight": np.ones((3, 32), np.float32)}, r"has shape .3, 32., expected .32, 32."),
        ({"{}.vocab_size": 33}, {}, "vocab_size is 33, and token_embd.weight has 32 rows"),
        ({"{}.block_count": None}, {}, "its metadata have no block_count of llama"),
        ({"{}.block_count": 2**31 - 1}, {}, "block_count is 2147483647, and it has tensors of 1 layers"),
        ({"{}.attention.head_count": "4"}, {}, "attention.head_count is .4.: expected a number"),
        ({"{}.attention.head_count_kv": [4, 3]}, {}, "attention.head_count_kv differs between layers"),
        ({"{}.attention.value_length": 3}, {}, "value_length is 3, and the width of a head is 8"),
        ({"{}.rope.dimension_count": 4}, {}, "rope.dimension_count is 4: a model of llama has 8"),
        ({"{}.rope.scaling.type": "other"}, {}, "rope.scaling.type is .other.: only none, linear, yarn"),
        ({"{}.attention.sliding_window": 8}, {}, "attention.sliding_window is 8: a model of llama has 0"),
        ({"{}.attention.causal": False}, {}, "attention.causal is false"),
        ({"{}.expert_gating_func": 2}, {}, "expert_gating_func is 2: a model of llama has 1"),
        ({"{}.rope.scaling.attn_factor": 2.0}, {}, "rope.scaling.attn_factor is 2.0"),
        ({"{}.rope.scaling.yarn_ext_factor": 0.5}, {}, "yarn_ext_factor is not 1"),
        ({"{}.context_length": None}, {}, "its metadata have no context_length of llama"),
        ({"{}.attention.layer_norm_rms_epsilon": None}, {}, "have no attention.layer_norm_rms_epsilon or"),
        ({"{}.vocab_size": "32"}, {}, "llama.vocab_size is '32': expected a whole number"),
        ({"general.type": [1, 2]}, {}, "general.type is .*: expected a text"),
        ({"{}.rope.freq_base": 0.0}, {"rope_freqs.weight": np.float32([1, 2, 4, 4])}, "has 4 numbers: expected"),
        ({}, {"rope_freqs.weight": np.float32([1, 2, np.inf, 4])}, "has a number that is not finite"),
        ({}, {"rope_freqs.weight": np.float32([1, 2])}, "has 2 numbers: expected 4 of at least 1"),
        ({}, {"blk.0.ffn_up.0.weight": np.ones((2, 2), np.float32)}, "is of one expert, as before 2024"),
        ({"{}.new_key": 1}, {}, "llama.new_key is 1: this key is unknown and may change the model"),
        ({}, {"rope_freqs.weight": np.float32([1, 2, 7, 9])}, "has other numbers than Llama 3's rule"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, metadata: Any, tensors: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        opened(small(tmp_path, metadata, tensors))


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("gemma3", {"rope.freq_base_swa": None, "rope.freq_base": None},
         {"rotary_base": 10000.0, "local_rotary_base": 10000.0}),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention.sliding_window": None},
         {"attention_softcap": 50.0, "softcap": 30.0, "window": 4096}),
        ("gemma2", {"attn_logit_softcapping": 0.0}, {"attention_softcap": None}),
        ("granite", {"attention.scale": 0.0}, {"attention_scale": 14**-0.5}),
        ("glm4", {"rope.dimension_count": None}, {"rotary_dims": 18}),
        ("mixtral", {"attention.head_count_kv": None}, {"n_kv_heads": 6}),
        ("llama2", {"rope.scaling.factor": 4.0}, {"rotary_scaling": "linear", "rotary_factor": 4.0}),
        ("llama2", {"rope.scale_linear": 4.0}, {"rotary_scaling": "linear", "rotary_factor": 4.0}),
    ],
)  # fmt: skip
def test_what_a_file_does_not_say_is_as_llama_cpp_assumes_it(
    tmp_path: Path, name: str, changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    metadata = read_header(str(gguf_models.save(name, tmp_path / name))).metadata
    architecture = metadata["general.architecture"]
    changed = {**metadata, **{f"{architecture}.{key}": value for key, value in changes.items()}}
    header = read_header(str(tmp_path / f"{name}.gguf"))
    model = parse_model(header._replace(metadata={key: value for key, value in changed.items() if value is not None}))
    assert {field: getattr(model, field) for field in fields} == fields


@pytest.mark.parametrize(
    ("name", "key", "value", "reason"),
    [
        ("cohere2", "logit_scale", None, "have no logit_scale of cohere2"),
        ("granite", "logit_scale", None, "have no logit_scale of granite"),
        ("granite", "rope.scaling.finetuned", False, "a Granite without rotary encoding"),
        ("gpt_neox", "use_parallel_residual", None, "have no use_parallel_residual of gptneox"),
        ("glm4_moe", "expert_gating_func", 1, "expert_gating_func is 1: a model of glm4_moe has 2"),
        ("glm4_moe", "leading_dense_block_count", 2**30, "leading_dense_block_count is 1073741824, of 3 layers"),
        ("olmo3", "attention.sliding_window_pattern", np.float32([1, 0]), "expected a value for each layer"),
        ("deepseek_v2", "expert_gating_func", 2, "expert_gating_func is 2: a model of deepseek_v2 has 1"),
    ],
)
def test_keys_of_families_that_are_refused(tmp_path: Path, name: str, key: str, value: Any, reason: str) -> None:
    header = read_header(str(gguf_models.save(name, tmp_path / name)))
    metadata = {**header.metadata, f"{header.metadata['general.architecture']}.{key}": value}
    with pytest.raises(UserError, match=reason):
        parse_model(header._replace(metadata={key: value for key, value in metadata.items() if value is not None}))


def test_a_dimension_of_one_that_ggml_drops(tmp_path: Path) -> None:
    path = gguf_models.save("qwen2_moe", tmp_path / "m")
    header = read_header(str(path))
    name = "blk.0.ffn_gate_inp_shexp.weight"
    stored = header.tensors[name]
    assert stored.shape == (1, 84)
    dropped = header._replace(tensors={**header.tensors, name: stored._replace(shape=(84,))})
    model = parse_model(header)
    found, expected = (hf.read_all(GgufSource(one, model, model)) for one in (dropped, header))
    for parameter, values in expected.items():
        np.testing.assert_array_equal(found[parameter], values)


def test_an_architecture_without_a_family(tmp_path: Path) -> None:
    metadata, tensors = gguf_files.llama(32, width=32)
    path = gguf_files.write(tmp_path / "a.gguf", "mamba", metadata, tensors)
    with pytest.raises(UserError, match="general.architecture is 'mamba': only .*llama.* can be read"):
        opened(path)


def test_a_vocabulary_alone(tmp_path: Path) -> None:
    metadata, _ = gguf_files.llama(32, width=32)
    with pytest.raises(UserError, match="it holds a vocabulary and no weights"):
        opened(gguf_files.write(tmp_path / "a.gguf", "llama", metadata, {}))


def test_a_file_in_a_bucket(gcs: GcsServer, tmp_path: Path) -> None:
    """Its header and its rows are read by ranges."""
    path = small(
        tmp_path, gguf_files.byte_pairs(["a", "b", "ab", *(f"t{i}" for i in range(29))], ["a b"], "gpt-2", ["t0"])
    )
    files.upload(str(path), "gs://bucket/m/small.gguf")
    expected = hf.read_all(opened(path)[1])
    checkpoint = Checkpoint.open("gs://bucket/m/small.gguf")
    assert checkpoint.model is not None
    found = hf.read_all(checkpoint.source(checkpoint.model))
    for parameter, values in expected.items():
        np.testing.assert_array_equal(found[parameter], values)
    assert load_tokenizer("gs://bucket/m/small.gguf").n_vocab == 32


def test_the_first_bytes_decide(tmp_path: Path) -> None:
    """Ollama's files have no ending."""
    path = small(tmp_path).rename(tmp_path / "sha256-1f2e")
    assert Checkpoint.open(str(path)).format == "GGUF"
    (tmp_path / "other.gguf").write_bytes(b"GGML" * 9)
    with pytest.raises(UserError, match="it does not begin as a GGUF file does"):
        _ = Checkpoint.open(str(tmp_path / "other.gguf")).format


def test_a_folder_of_files_names_them(tmp_path: Path) -> None:
    small(tmp_path)
    with pytest.raises(UserError, match="holds GGUF files: give one of them: small.gguf"):
        _ = Checkpoint.open(str(tmp_path)).format


def test_llama_3_s_rule_with_other_constants(tmp_path: Path) -> None:
    """A file has only the divisor of each frequency."""
    base, factor, high, original = 500000.0, 32.0, 8.0, 4096
    inverse = base ** (-np.arange(64) / 64) / (2 * np.pi)
    smooth = np.clip((original * inverse - 1) / (high - 1), 0, 1)
    metadata, tensors = gguf_files.llama(32, width=512)
    metadata |= {"{}.rope.freq_base": base, "{}.rope.dimension_count": 128}
    tensors["rope_freqs.weight"] = np.float32(1 / ((1 - smooth) / factor + smooth))
    model, _ = opened(gguf_files.write(tmp_path / "a.gguf", "llama", metadata, tensors))
    found = model.rotary_scaling, model.rotary_factor, model.rotary_high_freq_factor, model.rotary_original_seq
    assert found == ("llama3", factor, high, original)
