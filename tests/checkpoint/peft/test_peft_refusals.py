"""Folders of PEFT that are refused, each by one line that names the key or the tensor."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_folders as hf
from support import peft_folders

from mesh_transformer.checkpoint.hf.safetensors_file import encode_header, read_header
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.errors import UserError

Q = "base_model.model.model.layers.1.self_attn.q_proj"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    peft_folders.write(tmp_path, "llama")
    return tmp_path


def opened(folder: Path) -> Any:
    checkpoint = Checkpoint.open(str(folder / "peft"), base=str(folder / "base"))
    return checkpoint.source(checkpoint.model)


def change(folder: Path, **keys: Any) -> None:
    path = folder / "peft/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    stored = read_header(str(folder / "peft/adapter_model.safetensors"))
    return {name: tensor.read((slice(None),) * len(tensor.shape)) for name, tensor in stored.items()}


def write_tensors(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    header = encode_header((name, value.shape, value.dtype) for name, value in tensors.items())
    content = b"".join(np.ascontiguousarray(value).tobytes() for value in tensors.values())
    (folder / "peft/adapter_model.safetensors").write_bytes(header + content)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1]),
        ("arrow_config", {"top_k": 2}),
        ("velora_config", {"a": 1}),
        ("kasa_config", {"beta": 1}),
        ("monteclora_config", {"n": 1}),
        ("megatron_config", {"tp": 2}),
        ("a_key_of_tomorrow", 1),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", ["gaussian"]),
        ("peft_type", "IA3"),
        ("task_type", "SEQ_CLS"),
        ("use_rslora", "yes"),
        ("lora_alpha", True),
        ("lora_alpha", 10**400),
        ("alpha_pattern", ["q_proj"]),
        ("alpha_pattern", {"q_proj": "8"}),
        ("alpha_pattern", {"(q_proj": 8}),
        ("base_model_name_or_path", 7),
    ],
)
def test_a_key(llama: Path, key: str, value: Any) -> None:
    change(llama, **{key: value})
    with pytest.raises(UserError, match=key):
        opened(llama)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", False),
        ("a_key_of_tomorrow", None),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", "eva"),
        ("init_lora_weights", False),
        ("task_type", None),
        ("loftq_config", {"loftq_bits": 4}),
        ("layers_to_transform", [0]),
        ("r", 64),
    ],
)
def test_keys_without_influence(llama: Path, key: str, value: Any) -> None:
    before = hf.read_all(opened(llama))
    change(llama, **{key: value})
    for name, array in hf.read_all(opened(llama)).items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.filterwarnings("error")
def test_a_pattern_that_takes_for_ever(llama: Path) -> None:
    change(llama, alpha_pattern={r"(?:[a-z_.]|\w|.)*[!?]": 8})
    with pytest.raises(UserError, match="no usable pattern"):
        opened(llama)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("base_model.model.lm_head.lora_A.weight", "lm_head.* not the head"),
        ("base_model.model.model.embed_tokens.lora_A.weight", "embed_tokens.* not tables"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "not tables"),
        (f"{Q}.lora_magnitude_vector", "DoRA"),
        (f"{Q}.lora_B.bias", "b has a bias"),
        ("base_model.model.lm_head.weight", "not the head"),
        ("base_model.model.model.norm.weight", "is no a or b"),
        ("base_model.model.model.layers.0.self_attn.o_gate.lora_A.weight", "has lora_A and no lora_B"),
    ],
)
def test_a_tensor(llama: Path, name: str, words: str) -> None:
    write_tensors(llama, {**tensors_of(llama), name: np.ones((2, 12), np.float32)})
    with pytest.raises(UserError, match=words):
        opened(llama)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{Q}.lora_A.weight": (2, 13)}, "q_proj has the shapes"),
        ({f"{Q}.lora_B.weight": (24, 2)}, "q_proj has the shapes"),
        ({f"{Q}.lora_A.weight": (3, 12)}, "q_proj has the shapes"),
        ({f"{Q}.lora_A.weight": (13, 12), f"{Q}.lora_B.weight": (12, 13)}, "q_proj has the shapes"),
        ({f"{Q}.lora_A.weight": (0, 12), f"{Q}.lora_B.weight": (12, 0)}, "q_proj has the shapes"),
        ({f"{Q}.lora_A.weight": (24,)}, "expected a matrix of floats"),
        ({Q.replace(".1.", ".2.") + end: (2, 2) for end in (".lora_A.weight", ".lora_B.weight")}, "is no matrix of"),
    ],
)
def test_another_models_shapes(llama: Path, changes: dict[str, tuple[int, ...]], words: str) -> None:
    tensors = {**tensors_of(llama), **{name: np.ones(shape, np.float32) for name, shape in changes.items()}}
    write_tensors(llama, tensors)
    with pytest.raises(UserError, match=words):
        opened(llama)


def test_experts_of_another_model(tmp_path: Path) -> None:
    peft_folders.write(tmp_path, "mixtral")
    tensors = tensors_of(tmp_path)
    stem = "base_model.model.model.layers.0.mlp.experts.base_layer"
    write_tensors(tmp_path, {**tensors, f"{stem}.lora_A.weight": np.ones((8, 12), np.float32)})
    with pytest.raises(UserError, match="experts.base_layer has the shapes"):
        opened(tmp_path)
    write_tensors(tmp_path, {**tensors, f"{stem}.lora_B.weight": np.ones((31, 6), np.float32)})
    with pytest.raises(UserError, match="experts.base_layer with .* is no matrix"):
        opened(tmp_path)


def test_files_that_are_missing(llama: Path) -> None:
    path = llama / "peft/adapter_model.safetensors"
    path.rename(path.with_suffix(".bin"))
    with pytest.raises(UserError, match="is pickled, and is not read"):
        opened(llama)
    path.with_suffix(".bin").unlink()
    with pytest.raises(UserError, match="no adapter_model.safetensors"):
        opened(llama)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (None, "names no base: give the base with --ckpt BASE --adapter"),
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "give the float model with --ckpt BASE --adapter"),
        ("nowhere/at/all", "cannot be opened|no checkpoint"),
        (".", "base of itself"),
    ],
)
def test_the_base_that_it_names(llama: Path, monkeypatch: pytest.MonkeyPatch, base: str | None, words: str) -> None:
    monkeypatch.chdir(llama / "peft")
    change(llama, base_model_name_or_path=base)
    with pytest.raises(UserError, match=words):
        _ = Checkpoint.open(str(llama / "peft")).model


def test_a_folder_alone_takes_the_base_that_it_names(llama: Path) -> None:
    alone, run = Checkpoint.open(str(llama / "peft")), Checkpoint.open(str(llama / "run"))
    assert alone.base.path == str(llama / "base")
    expected = hf.read_all(run.source(run.model))
    for name, array in hf.read_all(alone.source(alone.model)).items():
        # tables have other padding
        if "/blocks/" in name:
            np.testing.assert_array_equal(array, expected[name])


def test_a_whole_model_is_no_adapter(llama: Path) -> None:
    checkpoint = Checkpoint.open(str(llama / "base"), base=str(llama / "base"))
    with pytest.raises(UserError, match="is a whole model, not adapters of"):
        checkpoint.source(checkpoint.model)


def test_adapters_on_adapters(llama: Path) -> None:
    once = Checkpoint.open(str(llama / "peft"))
    twice = Checkpoint.open(str(llama / "peft"), base=once)
    plain = Checkpoint.open(str(llama / "base"))
    base, first, second = (hf.read_all(c.source(c.model)) for c in (plain, once, twice))
    for name, array in second.items():
        np.testing.assert_allclose(array - first[name], first[name] - base[name], rtol=1e-5, atol=1e-5)
