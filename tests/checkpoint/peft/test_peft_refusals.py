"""Folders of PEFT that are refused, each by one line that names the key or the tensor."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import hf_folders as hf
from support import peft_folders
from support.gcs_server import GcsServer

from mesh_transformer.checkpoint.hf.safetensors_file import encode_header, read_header
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.peft.config import AdapterConfig
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
        ("a_key_of_tomorrow", False),
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
        # of the library regex alone; the first would fill the memory
        ("alpha_pattern", {"(?R)": 8}),
        ("alpha_pattern", {"(?e)(?:q_proj){e<=5}": 8}),
        ("alpha_pattern", {f".*{number}": 8 for number in range(1001)}),
        ("alpha_pattern", {501 * "q": 8}),
        ("target_parameters", "experts"),
        ("target_parameters", [7]),
        ("base_model_name_or_path", 7),
        ("base_model_name_or_path", 501 * "x"),
        ("base_model_name_or_path", "x\0y"),
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


def test_a_pattern_that_takes_for_ever(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(llama, alpha_pattern={r"(?:[a-z_.]|\w|.)*[!?]": 8})
    monkeypatch.setattr("mesh_transformer.checkpoint.peft.config._MATCHES_S", 0.5)
    with pytest.raises(UserError, match="takes over 0.5 seconds"):
        opened(llama)


def test_a_pattern_for_each_module_of_a_large_model() -> None:
    """As EVA writes them. They are names, which are looked up; and a pattern before them counts first."""
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(300)]
    alphas = {name: number for number, name in enumerate(names)}
    config = AdapterConfig("x", None, None, 1, {r"layers\.7\.mlp\.experts\.1\.up_proj": -1, **alphas}, False, ())
    began = time.process_time()
    scales = [config.scale(name, 1) for name in names]
    assert time.process_time() - began < 5
    expected = [-1 if name == "model.layers.7.mlp.experts.1.up_proj" else alphas[name] for name in names]
    assert scales == expected
    assert config.scale("model.layers.0.self_attn.q_proj", 1) == 1


def test_one_large_rank_does_not_fill_the_memory(tmp_path: Path) -> None:
    """All layers and experts have the largest rank."""
    peft_folders.write(tmp_path, "mixtral", layers=24, n_experts=32)
    module = "base_model.model.model.layers.1.block_sparse_moe.experts.1"
    shapes = {f"{module}.w1.lora_A.weight": (16, 12), f"{module}.w1.lora_B.weight": (16, 16),
              f"{module}.w3.lora_A.weight": (16, 12), f"{module}.w3.lora_B.weight": (16, 16)}  # fmt: skip
    write_tensors(tmp_path, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})
    with pytest.raises(UserError, match="more than the model"):
        opened(tmp_path)


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
    with pytest.raises(
        UserError, match="no adapter_model.safetensors: adapter_model.bin, which is pickled, is not read"
    ):
        opened(llama)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        (None, "names no base: give the base with --ckpt BASE --adapter"),
        ("unsloth/Llama-3.2-1B-Instruct-bnb-4bit", "give the float model with --ckpt BASE --adapter"),
        ("nowhere/at/all", "the base of .*peft, nowhere/at/all, cannot be opened.*--base DIR says where it is now"),
        ("gs://", "no path of gs://"),
        ("gs://-x/y", "no path of gs://"),
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


def test_a_folder_in_a_bucket(llama: Path, gcs: GcsServer) -> None:
    local = Checkpoint.open(str(llama / "peft"))
    peft_folders.write_adapters_of(local.model, "gs://bucket/adapter", str(llama / "base"))
    expected = hf.read_all(local.source(local.model))
    for base in (None, str(llama / "base")):
        remote = Checkpoint.open("gs://bucket/adapter", base=base)
        for name, array in hf.read_all(remote.source(remote.model)).items():
            np.testing.assert_array_equal(array, expected[name])


def test_a_name_without_an_organization_is_of_the_hub(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama)
    change(llama, base_model_name_or_path="gpt2", revision="v1")
    assert Checkpoint.open("peft").base.path == "hf://gpt2@v1"
    (llama / "gpt2").mkdir()
    assert Checkpoint.open("peft").base.path == "gpt2"


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
