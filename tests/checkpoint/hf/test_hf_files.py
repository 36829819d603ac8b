"""Hugging Face folders from untrusted sources: damaged, incomplete, or with paths outside the folder."""

import json
import shutil
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import hf_folders as hf
from support.gcs_server import CUT, GcsServer
from support.mutations import mutated_bytes

from mesh_transformer.checkpoint.hf.safetensors_file import MAX_HEADER_BYTES, read_header
from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.errors import UserError

MODEL = hf.model_config(layers=2, d_model=12, n_vocab=7, vocab_multiple=8, seq=8, pe_rotary_dims=4)
INDEX = "model.safetensors.index.json"
# A read of MODEL allocates under 0.3 MB; an allocation of an unchecked size from a file would exceed this limit.
LIMIT_BYTES = 4 << 20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one file."""
    folder = tmp_path_factory.mktemp("whole")
    write_hf(hf.MemorySource(hf.random_params(MODEL)), MODEL, str(folder))
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in shards."""
    folder = tmp_path_factory.mktemp("sharded")
    write_hf(hf.MemorySource(hf.random_params(MODEL)), MODEL, str(folder), shard_bytes=5_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def edit_header(path: Path, change: Any) -> None:
    """Rewrite the header of a safetensors file and keep the data."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def refused(folder: Path, match: str, model: Any = MODEL) -> None:
    with pytest.raises(UserError, match=match):
        hf.read_all(HFSource(str(folder), model))


@pytest.mark.parametrize(
    "shard",
    [
        "../{}",
        "/etc/{}",
        "sub/{}",
        "..\\{}",
        "..",
        ".safetensors/..",
        "config.json",
        "",
        7,
        None,
        "x\0.safetensors",
    ],
)
def test_an_index_cannot_name_files_outside_the_folder(sharded, tmp_path, shard) -> None:
    folder = copy(sharded, tmp_path)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    name, file = next(iter(weight_map.items()))
    # the file exists at the path outside the folder
    shutil.copy(folder / file, tmp_path / file)
    edit_json(folder / INDEX, weight_map={**weight_map, name: str(shard).format(file) if shard else shard})
    refused(folder, "names the shard")


def test_an_index_that_does_not_match_its_shards_is_refused(sharded, tmp_path) -> None:
    folder = copy(sharded, tmp_path)
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted(set(weight_map.values()))
    name = next(name for name, file in weight_map.items() if file == files[0])
    for edited, match in [
        ({**weight_map, name: files[1]}, f"lists {name} in {files[1]}, which does not hold it"),
        ({**weight_map, name: "other.safetensors"}, "no such file: .*other.safetensors"),
        ({k: v for k, v in weight_map.items() if k != name}, f"{name} is missing"),
        ({**weight_map, "transformer.extra": files[0]}, "lists transformer.extra in"),
        ([], "has no weight_map"),
    ]:
        edit_json(folder / INDEX, weight_map=edited)
        refused(folder, match)
    (folder / INDEX).write_text("[" * 100_000)
    refused(folder, "index.json cannot be read")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h: h.pop("lm_head.bias"), "lm_head.bias begins|its tensors end at|begins at byte"),
        (lambda h: h["lm_head.bias"].update(shape=[8]), r"lm_head.bias: F32 \(8,\) takes 32 bytes, not 28"),
        (
            lambda h: h["lm_head.bias"].update(shape=[10**18, 10**18]),
            "more than .* dimensions or a dimension over",
        ),
        (lambda h: h["lm_head.bias"].update(shape=[-7]), "not whole numbers"),
        (lambda h: h["lm_head.bias"].update(shape=[7.0]), "not whole numbers"),
        (lambda h: h["lm_head.bias"].update(shape=7), "not whole numbers"),
        (lambda h: h["lm_head.bias"].update(data_offsets=[0, 28]), "begins at byte"),
        (lambda h: h["lm_head.bias"].update(data_offsets=[10**18, 10**18 + 28]), "begins at byte"),
        (lambda h: h["lm_head.bias"].update(data_offsets=[1]), "entry is incomplete"),
        (lambda h: h["lm_head.bias"].pop("dtype"), "entry is incomplete"),
        (lambda h: h["lm_head.bias"].update(dtype="F8_E4M3"), "dtype 'F8_E4M3' is not supported"),
        (lambda h: h["lm_head.bias"].update(dtype=["F32"]), "is not supported"),
        (lambda h: h["lm_head.bias"].update(dtype="I32"), "lm_head.bias is int32, expected one of float32"),
        (lambda h: h.update({"lm_head.bias": 3}), "entry is incomplete"),
        (lambda h: h.update({"lm_head.bios": h.pop("lm_head.bias")}), "lm_head.bias is missing"),
        (
            lambda h: h["transformer.wte.weight"].update(shape=[12, 7]),
            r"transformer.wte.weight has shape \(12, 7\), expected \(7, 12\)",
        ),
    ],
)
def test_a_wrong_header_is_refused(whole, tmp_path, change, match) -> None:
    folder = copy(whole, tmp_path)
    edit_header(folder / "model.safetensors", change)
    refused(folder, match)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_truncated_file_is_refused(whole, tmp_path, keep) -> None:
    folder = copy(whole, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, "truncated")


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_a_header_length_beyond_the_file_is_refused(whole, tmp_path, length) -> None:
    folder = copy(whole, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    refused(folder, "cannot hold a header")


def test_a_long_header_is_refused_before_it_is_parsed(tmp_path) -> None:
    """Parsed empty lists take 31 times the memory of their text."""
    path = tmp_path / "model.safetensors"
    header = b'{"a": [' + b"[]," * (MAX_HEADER_BYTES // 3) + b"[]]}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=f"has {len(header)} bytes, at most {MAX_HEADER_BYTES} are read"):
            read_header(str(path))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_file_that_shrinks_after_it_is_opened_is_damage(whole, tmp_path) -> None:
    folder = copy(whole, tmp_path)
    source = HFSource(str(folder))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedCheckpoint, match="lm_head.bias: 28 bytes expected, 27 found"):
        hf.read_all(source)


def test_a_folder_without_weights_or_config_is_refused(whole, tmp_path) -> None:
    folder = copy(whole, tmp_path)
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights in .*: expected model.safetensors or pytorch_model.bin")
    (folder / "config.json").unlink()
    refused(folder, "is not a Hugging Face folder: it has no config.json$")


def test_layers_of_different_dtypes_are_read_as_float32(tmp_path, caplog) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    hf.save_transformers_model(tmp_path, MODEL)
    path, name = tmp_path / "model.safetensors", "transformer.h.{}.ln_1.bias"
    tensors = load_file(path)
    rounded = {name.format(layer): tensors[name.format(layer)].to(torch.float16) for layer in range(2)}
    matrix = "transformer.h.0.attn.q_proj.weight"
    save_file({**tensors, name.format(1): rounded[name.format(1)], matrix: tensors[matrix].to(torch.bfloat16)}, path)
    source = HFSource(str(tmp_path))
    assert f"{name.format('{}')} is float16 and float32: it is read as float32" in caplog.text
    assert source.tensors["params/blocks/attention/q/w"].dtype == np.float32
    prompt = np.arange(6, dtype=np.int32)[None] % MODEL.n_vocab
    # as transformers reads the file in float32; float32 on both sides
    np.testing.assert_allclose(
        hf.model_logits(source.model, hf.to_tree(hf.read_all(source)), prompt),
        hf.transformers_logits(tmp_path, prompt),
        rtol=0,
        atol=2e-5,
    )
    # a tensor has one dtype in all layers, and tensors may differ
    save_file({**tensors, **rounded}, path)
    found = HFSource(str(tmp_path)).tensors
    assert found["params/blocks/norm/offset"].dtype == np.float16
    assert found["params/blocks/norm/scale"].dtype == np.float32


def test_float64_is_read_as_float32(tmp_path, caplog) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    hf.save_transformers_model(tmp_path, MODEL)
    path = tmp_path / "model.safetensors"
    expected = hf.read_all(HFSource(str(tmp_path)))
    save_file({name: tensor.to(torch.float64) for name, tensor in load_file(path).items()}, path)
    found = hf.read_all(HFSource(str(tmp_path)))
    assert "transformer.wte.weight is float64: it is read as float32" in caplog.text
    for name, array in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], array)


def test_unknown_tensors_are_refused_and_old_buffers_ignored(tmp_path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    hf.save_transformers_model(tmp_path, MODEL)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    expected = hf.read_all(HFSource(str(tmp_path)))
    buffers = {"bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), "masked_bias": torch.tensor(-1e9)}
    buffers = {f"transformer.h.{i}.attn.{name}": x.clone() for name, x in buffers.items() for i in range(2)}
    save_file({**tensors, **buffers}, path)
    found = hf.read_all(HFSource(str(tmp_path)))
    assert all(np.array_equal(found[name], array) for name, array in expected.items())
    save_file({**tensors, "transformer.h.2.ln_1.bias": torch.zeros(12)}, path)
    refused(tmp_path, "transformer.h.2.ln_1.bias is not a tensor of GPTJForCausalLM with 2 layers")


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module."])
def test_the_prefix_of_a_wrapper_is_named(tmp_path, prefix: str) -> None:
    from safetensors.torch import load_file, save_file

    hf.save_transformers_model(tmp_path, MODEL)
    path = tmp_path / "model.safetensors"
    save_file({prefix + name: tensor for name, tensor in load_file(path).items()}, path)
    refused(tmp_path, f"names of tensors have the prefix '{prefix}', as in {prefix}")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_any_mutation_is_read_equal_or_refused(whole, tmp_path, name, random) -> None:
    _check_mutation(whole, tmp_path, name, random)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_any_mutation_of_an_index_is_read_equal_or_refused(sharded, tmp_path, random) -> None:
    _check_mutation(sharded, tmp_path, INDEX, random)


def _check_mutation(folder: Path, tmp_path: Path, name: str, random: Random) -> None:
    """The format has no checksum of the data: values may differ, but only where bytes of the data were changed."""
    raw = (folder / name).read_bytes()
    edited = mutated_bytes(random, raw)
    shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
    (tmp_path / "copy" / name).write_bytes(edited)
    tracemalloc.start()
    try:
        found = hf.read_all(HFSource(str(tmp_path / "copy"), MODEL))
    except (UserError, DamagedCheckpoint):
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LIMIT_BYTES
    expected = hf.read_all(HFSource(str(folder), MODEL))
    changed = sum(int((found[n].view(np.uint8) != array.view(np.uint8)).sum()) for n, array in expected.items())
    start = 8 + int.from_bytes(raw[:8], "little") if name.endswith(".safetensors") else len(raw)
    assert changed <= sum(a != b for a, b in zip(raw[start:], edited[start:], strict=False))


def test_a_bucket_is_read_and_written(gcs: GcsServer, whole) -> None:
    model, folder = MODEL, "gs://bucket/models/hf"
    params = hf.random_params(model)
    gcs.fail(503, method="POST|PUT", path="/upload/")
    gcs.fail(CUT, method="PUT", path="/upload/")
    write_hf(hf.MemorySource(params), model, folder, shard_bytes=5_000)
    gcs.fail(503, method="GET", path="model-00001")
    gcs.fail(CUT, method="GET", path="model-00002")
    found = hf.read_all(HFSource(folder, model))
    assert [fault for fault in gcs.faults if fault.times] == []
    expected = hf.read_all(HFSource(str(whole), model))
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


def test_a_slice_in_a_bucket_fetches_little_else(gcs: GcsServer) -> None:
    model, folder = hf.model_config(n_vocab=5000), "gs://bucket/models/hf"
    write_hf(hf.MemorySource(hf.random_params(model)), model, folder)
    source = HFSource(folder)
    before = gcs.bytes_read
    source.read("params/head/logits/w", (hf.ALL, slice(100, 200)))
    assert gcs.bytes_read - before == 48 * 100 * 4
