"""pytorch_model.bin, in one file and in shards."""

import io
import json
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import hf_folders as hf
from support.gcs_server import CUT, HALF

from mesh_transformer.checkpoint.hf.source import HFSource
from mesh_transformer.checkpoint.hf.torch_file import read_tensors
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.errors import UserError

MODEL = hf.model_config(layers=2, d_model=12, n_vocab=7, vocab_multiple=8, seq=8, pe_rotary_dims=4)


def write_bin(folder: Path, dtype: str = "float32", shards: int = 1) -> dict[str, torch.Tensor]:
    """Write a folder as transformers did before safetensors, with the buffers of those versions."""
    state = dict(hf.save_transformers_model(folder, MODEL, dtype=dtype).state_dict())
    (folder / "model.safetensors").unlink()
    for layer in range(MODEL.layers):
        state[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril().to(torch.bool)
        state[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e9)
    if shards == 1:
        torch.save(OrderedDict(state), folder / "pytorch_model.bin")
        return state
    weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(state)}
    for file in set(weight_map.values()):
        torch.save({n: state[n] for n, f in weight_map.items() if f == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return state


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_those_of_torch(tmp_path, dtype, shards) -> None:
    state = write_bin(tmp_path, dtype, shards)
    source = HFSource(str(tmp_path), MODEL)
    found = hf.read_all(source)
    for name, module in [("attention/o/w", "attn.out_proj.weight"), ("ff/in/b", "mlp.fc_in.bias")]:
        for layer in range(MODEL.layers):
            expected = hf.to_numpy(state[f"transformer.h.{layer}.{module}"])
            parameter = found[f"params/blocks/{name}"][layer]
            assert parameter.dtype == expected.dtype
            assert np.ascontiguousarray(parameter.T).tobytes() == np.ascontiguousarray(expected).tobytes()
    index = (slice(3, 9), slice(2, 8))
    np.testing.assert_array_equal(source.read("params/head/logits/w", index), found["params/head/logits/w"][index])


def test_safetensors_are_preferred(tmp_path) -> None:
    write_bin(tmp_path)
    hf.save_transformers_model(tmp_path, MODEL, seed=1)
    from_safetensors = hf.read_all(HFSource(str(tmp_path)))
    (tmp_path / "model.safetensors").unlink()
    from_bin = hf.read_all(HFSource(str(tmp_path)))
    assert not np.array_equal(from_safetensors["params/embed/tokens/w"], from_bin["params/embed/tokens/w"])


class Malice:
    """An object that writes to standard output when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("executed",)


@pytest.mark.parametrize(("protocol", "reason"), [(2, "names"), (4, "has the instruction STACK_GLOBAL")])
def test_a_pickle_that_calls_a_function_is_refused_without_the_call(tmp_path, capsys, protocol, reason) -> None:
    write_bin(tmp_path)
    torch.save({"a": Malice()}, tmp_path / "pytorch_model.bin", pickle_protocol=protocol)
    with pytest.raises(UserError, match=f"is not a plain dictionary of tensors: its pickle {reason}"):
        HFSource(str(tmp_path))
    assert "executed" not in capsys.readouterr().out


def test_a_pickle_that_allocates_is_refused(tmp_path) -> None:
    write_bin(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path, "a") as archive:
        prefix = archive.namelist()[0].split("/")[0]

    def allocating(size: int) -> bytes:
        return b"\x80\x02cbuiltins\nbytearray\nJ" + size.to_bytes(4, "little") + b"\x85R."

    assert pickle.loads(allocating(5)) == bytearray(5)  # noqa: S301
    rewrite(path, f"{prefix}/data.pkl", allocating(2130706432))
    with pytest.raises(UserError, match="its pickle names 'builtins bytearray'"):
        HFSource(str(tmp_path))


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Replace one member of an archive."""
    with zipfile.ZipFile(path) as archive:
        members = {item: archive.read(item) for item in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for item, data in {**members, name: content}.items():
            archive.writestr(item, data)


def other_contents() -> list[tuple[str, Any, str]]:
    expanded = torch.zeros(1).expand(7)
    return [
        ("list", [torch.zeros(1)], "holds a list, not a dictionary"),
        ("number", {"a": 3}, ": a is a int, not a tensor"),
        ("key", {3: torch.zeros(1)}, "a tensor's name is a int"),
        ("order", {"a": torch.zeros(2, 3).T}, ": a: its elements are not contiguous"),
        ("stride", {"lm_head.bias": expanded}, "lm_head.bias: its elements are not contiguous"),
    ]


@pytest.mark.parametrize(("content", "reason"), [c[1:] for c in other_contents()])
def test_other_contents_than_a_dictionary_of_tensors_are_refused(tmp_path, content, reason) -> None:
    write_bin(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match=reason):
        HFSource(str(tmp_path))


def test_files_that_are_not_archives_are_refused(tmp_path) -> None:
    state = write_bin(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"in the format before torch 1.6; if so, load it with torch and save it again"):
        HFSource(str(tmp_path))
    path.write_bytes(b"")
    with pytest.raises(UserError, match="cannot be read"):
        HFSource(str(tmp_path))
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as whole, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    with pytest.raises(UserError, match="does not have the layout that torch.save writes"):
        HFSource(str(tmp_path))


def test_a_file_is_read_without_torch(tmp_path) -> None:
    write_bin(tmp_path)
    code = (
        "import importlib.abc, sys\n"
        "class NoTorch(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "from mesh_transformer.checkpoint.hf.source import HFSource\n"
        f"print(HFSource({str(tmp_path)!r}).read('params/head/logits/b', (slice(0, 7),)).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    bias = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["lm_head.bias"]
    assert json.loads(found.stdout) == bias.tolist()


@pytest.mark.parametrize("status", [503, CUT, HALF])
def test_a_bucket_is_read_through_faults(tmp_path, gcs, status) -> None:
    write_bin(tmp_path, shards=2)
    for path in tmp_path.iterdir():
        gcs.put("bucket", f"m/{path.name}", path.read_bytes())
    gcs.fail(status, method="GET", path="alt=media", times=3)
    found = hf.read_all(HFSource("gs://bucket/m", MODEL))
    assert all(fault.times == 0 for fault in gcs.faults)
    expected = hf.read_all(HFSource(str(tmp_path), MODEL))
    assert found.keys() == expected.keys()
    assert all(array.tobytes() == expected[name].tobytes() for name, array in found.items())


def test_every_kind_and_layout_that_torch_writes(tmp_path) -> None:
    kinds = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8]
    state = {str(kind): torch.arange(-3, 3).reshape(2, 3).to(kind) for kind in [*kinds, torch.uint8, torch.bool]}
    shared = torch.arange(24.0).reshape(4, 6)
    state |= {
        "upper": shared[1:3],
        "again": shared,
        "one column": shared[2:3, 1:2],
        "empty": torch.zeros(0, 3),
    }
    state["parameter"] = torch.nn.Parameter(torch.ones(2))
    torch.save(OrderedDict(state), tmp_path / "x.bin")
    found = read_tensors(str(tmp_path / "x.bin"))
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        values = found[name].read((slice(None),) * tensor.ndim)
        expected = tensor.detach().numpy()
        assert values.dtype == expected.dtype
        np.testing.assert_array_equal(values, expected)


def test_a_module_with_its_versions(tmp_path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    # the state is an OrderedDict with the attribute _metadata
    torch.save(module.state_dict(), tmp_path / "x.bin")
    found = read_tensors(str(tmp_path / "x.bin"))
    np.testing.assert_array_equal(found["0.weight"].read((slice(None),) * 2), module[0].weight.detach().numpy())


TENSOR = (
    b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
    b"X\x03\x00\x00\x00cpuK\x03tQK\x00K\x03\x85K\x01\x85\x89}tR"
)


@pytest.mark.parametrize(
    ("pickled", "reason"),
    [
        (b"}X\x01\x00\x00\x00a" + TENSOR + b"s.", None),
        (b"}X\x01\x00\x00\x00a" + TENSOR.replace(b"QK\x00", b"QK\x01") + b"s.", "a: its elements are not contiguous"),
        (b"}X\x01\x00\x00\x00a" + TENSOR.replace(b"K\x03tQ", b"K\x04tQ") + b"s.", "missing or has another size"),
        (b"}X\x01\x00\x00\x00a" + TENSOR.replace(b"K\x03\x85", b"J\xff\xff\xff\xff\x85") + b"s.",
         "without valid sizes"),
        (b"}X\x01\x00\x00\x00a" + TENSOR.replace(b"0X\x03", b"1X\x03") + b"s.", "missing or has another size"),
        (b"}X\x01\x00\x00\x00a" + TENSOR.replace(b"FloatS", b"QInt8S") + b"s.", "QInt8Storage' is not supported"),
        (b"}.", "data/0 belongs to no tensor"),
        (b"}(" + b")" + b"2\x86" * 60 + TENSOR + b"u.", "has the instruction DUP"),
        (b"})" + b"q\x00h\x00\x86" * 60 + TENSOR + b"s.", "a tensor's name is a tuple"),  # its hash takes forever
        (b"}r\xff\xff\xff\xff.", "belongs to no tensor"),  # pickle allocates 2**32 memo entries for it
        (b"]q\x00h\x00a.", "holds a list"),
        (b"ccollections\nOrderedDict\n(K\x01tR.", "calls 'collections OrderedDict'"),
        (b"K\x01K\x01R.", "a call of an object that is not a function"),
        (b"(.", "with a missing or wrong value"),
        (b"R.", "pickle is damaged"),
        (b"h\x07.", "pickle is damaged"),
        (b"}", "pickle is damaged"),
        (b"I1\n.", "has the instruction INT"),
        (bytes((1 << 20) + 1), "at most 1048576 are read"),
    ],
)  # fmt: skip
def test_hand_written_pickles(tmp_path, pickled, reason) -> None:
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/data/0", np.arange(3, dtype=np.float32).tobytes())
    if reason is None:
        assert read_tensors(str(path))["a"].read((slice(1, 3),)).tolist() == [1, 2]
        return
    with pytest.raises(UserError, match=reason):
        read_tensors(str(path))


def test_another_byte_order_is_refused(tmp_path) -> None:
    write_bin(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path) as archive:
        prefix = archive.namelist()[0].split("/")[0]
    rewrite(path, f"{prefix}/byteorder", b"big")
    with pytest.raises(UserError, match="does not have the layout that torch.save writes"):
        HFSource(str(tmp_path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bin")
    write_bin(path)
    return path


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=3),
    tail=st.sampled_from([0, 0, 0, 1, 200]),
)
def test_any_mutation_is_read_or_refused(folder, edits, tail) -> None:
    """The CRCs of an archive are not compared, so a changed byte of data can go unnoticed, but no other change."""
    path = folder / "pytorch_model.bin"
    raw = path.read_bytes()
    data = bytearray(raw)
    for position, value in edits:
        data[min(int(position * len(data)), len(data) - 1)] = value
    path.write_bytes(data[: len(data) - tail])
    try:
        found = hf.read_all(HFSource(str(folder), MODEL))
    except (UserError, DamagedCheckpoint):
        return
    finally:
        path.write_bytes(raw)
    expected = hf.read_all(HFSource(str(folder), MODEL))
    changed = sum(int((found[n].view(np.uint8) != array.view(np.uint8)).sum()) for n, array in expected.items())
    assert changed <= len(edits)
