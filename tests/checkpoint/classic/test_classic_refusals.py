"""Refused classic checkpoints: the message gives the file, the array, the expected and the found value."""

import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.classic_folders import RandomSource, model_config, write

from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.open import Checkpoint, step_of
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.errors import UserError


def refusal(folder: Path, **values) -> str:
    with pytest.raises(UserError) as error:
        ClassicSource(str(folder), model_config(**values))
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"layers": 3}, r"shard_0: expected 37 arrays \(slim\) or 111 \(full\) for model.layers 3, found 27"),
        ({"layers": 3}, r"a slim checkpoint of 2 layers has this number"),
        ({"d_model": 32}, r"shard_0/0.npz: arr_0 \(.*embedding_shard/~/linear/b\): expected \(32,\).*found \(16,\)"),
        ({"n_heads": 1},
         r"2 shards do not divide model.n_heads 1 and model.n_vocab 24: possible are 1. If the checkpoint has a "
         r"shard_2, "),
        ({"n_vocab": 25}, r"2 shards do not divide model.n_heads 4 and model.n_vocab 25"),
        ({"n_vocab": 26},
         r"shard_0/0.npz: arr_1 \(.*linear/w\): expected \(13, 16\) of floats, found \(12, 16\) float32"),
        ({"norm": "rmsnorm"}, r"expected 24 arrays \(slim\) or 72 \(full\) for model.layers 2, found 27"),
        ({"pe": "fixed"}, r"expected 28 arrays \(slim\)"),
        ({"pe": "t5"}, r"expected 28 arrays \(slim\)"),
        ({"norm": "scalenorm-bias"}, r"arr_\d \(.*rms_norm/offset\): expected \(\) of floats, found \(16,\)"),
    ],
)  # fmt: skip
def test_another_model(tmp_path, change, expected):
    write(tmp_path, 2)
    assert re.search(expected, refusal(tmp_path, **change))


def test_positions_of_another_length(tmp_path):
    write(tmp_path, 2, pe="fixed")
    assert re.search(r"pos_embs\): expected \(10, 8\) of floats, found \(8, 8\)", refusal(tmp_path, pe="fixed", seq=10))


def test_missing_files(tmp_path):
    write(tmp_path, 3, n_heads=3, d_model=12)
    (tmp_path / "shard_2/7.npz").unlink()
    (tmp_path / "shard_2/15.npz").unlink()
    assert re.search(r"shard_2: 7.npz, 15.npz missing", refusal(tmp_path))
    shutil.rmtree(tmp_path / "shard_1")
    assert "shard_1 is missing" in refusal(tmp_path)


def test_a_truncated_file(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "shard_1/3.npz"
    path.write_bytes(path.read_bytes()[:-30])
    assert re.search(r"shard_1/3.npz: not a complete .npz file", refusal(tmp_path))
    path.write_bytes(b"")
    assert re.search(r"shard_1/3.npz: not a complete .npz file", refusal(tmp_path))


def test_a_pickle_is_not_read(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "shard_1/3.npz"
    arrays = list(np.load(path).values())
    np.savez(path, np.array([{"a": 1}], dtype=object), *arrays[1:])
    assert re.search(r"shard_1/3.npz: 'arr_0.npy': a pickled array \(dtype \|O\)", refusal(tmp_path))


def test_unexpected_arrays(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "shard_1/3.npz"
    arrays = list(np.load(path).values())
    np.savez(path, *arrays, arrays[0])
    assert re.search(r"shard_1/3.npz: expected arr_0 to arr_1, found arr_0, arr_1, arr_2", refusal(tmp_path))
    np.savez(path, **{"../../evil": arrays[0], "arr_1": arrays[1]})
    assert "expected arrays named arr_0, arr_1" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [np.int64, np.complex64, np.float64, ">f4"])
def test_other_dtypes(tmp_path, dtype):
    write(tmp_path, 2)
    path = tmp_path / "shard_0/3.npz"
    np.savez(path, *[array.astype(dtype) for array in np.load(path).values()])
    assert re.search(r"shard_0/3.npz: .*dtype '.*': expected one of <f4", refusal(tmp_path))


def test_mixed_dtypes(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "shard_0/3.npz"
    np.savez(path, *[array.astype(np.float16) for array in np.load(path).values()])
    assert re.search(r"shard_.*: expected float(32|16) as in .*, found float(16|32)", refusal(tmp_path))


def test_shards_of_different_steps(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "shard_1/15.npz"
    np.savez(path, np.int32(8))
    assert re.search(
        r"15.npz: arr_0 \(step\): expected the same count of 0 or more in all shards, found \[7, 8\]",
        refusal(tmp_path),
    )


@pytest.mark.parametrize("above", [False, True])
def test_the_v2_model_is_refused_by_name(tmp_path, above):
    for part in ("params", "opt_state"):
        (tmp_path / part).mkdir()
        np.savez(tmp_path / part / "shard_0.npz", np.zeros(3))
    if above:
        write(tmp_path / "step_1", 1)
        shutil.rmtree(tmp_path / "params")
        (tmp_path / "meta.json").write_text('{"total_hosts": 1, "step": 1}')
    with pytest.raises(UserError, match="unreleased V2 model"):
        Checkpoint.open(str(tmp_path)).source(model_config())


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"step": "5", "checkpoints": []}', '{"step": 5, "checkpoints": 3}', "[" * 100_000]
)  # fmt: skip
def test_a_bad_meta_json(tmp_path, content):
    write(tmp_path / "step_5", 1)
    (tmp_path / "meta.json").write_text(content)
    with pytest.raises(UserError, match="meta.json: expected a JSON object"):
        Checkpoint.open(str(tmp_path)).source(model_config())


def test_a_missing_step(tmp_path):
    write(tmp_path / "step_5", 1)
    with pytest.raises(UserError, match=r"no checkpoint of step 6 in .*: available are \[5\]"):
        step_of(str(tmp_path), 6)
    (tmp_path / "meta.json").write_text(json.dumps({"step": 9, "checkpoints": [5, 9]}))
    with pytest.raises(UserError, match="no classic checkpoint of step 9"):
        Checkpoint.open(str(tmp_path)).source(model_config())
    with pytest.raises(UserError, match="no checkpoint in .*found nothing"):
        Checkpoint.open(str(tmp_path / "elsewhere")).source(model_config())


def test_a_compressed_array_that_expands_beyond_its_header(tmp_path):
    write(tmp_path, 1)
    path = tmp_path / "shard_0/3.npz"
    with zipfile.ZipFile(path) as archive:
        content = archive.read("arr_0.npy")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arr_0.npy", content + bytes(1 << 26))
    assert re.search(r"takes \d+ bytes, found \d+", refusal(tmp_path))


@pytest.mark.parametrize(
    ("shards", "values", "expected"),
    [
        (3, {}, "3 shards do not divide model.n_heads 4 and model.n_vocab 24: possible are 1, 2, 4$"),
        (0, {}, "0 shards"),
        (4, {"n_vocab": 22}, "4 shards do not divide .*model.n_vocab 22: possible are 1, 2$"),
        (1, {"d_head": 8}, "the classic format cannot hold this model"),
    ],
)
def test_nothing_is_written_for_an_unsupported_model(tmp_path, shards, values, expected):
    # model_copy, because a classic config cannot set such a d_head
    config = model_config().model_copy(update=values)
    with pytest.raises(UserError, match=expected):
        write_classic(RandomSource(config, full=False), config, str(tmp_path / "out"), shards)
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_for_another_model_or_without_moments(tmp_path):
    source = RandomSource(model_config(), full=False)
    for config, full in (
        (model_config(layers=3), False),
        (model_config(pe="t5"), False),
        (model_config(), True),
    ):
        with pytest.raises(UserError, match="memory"):
            write_classic(source, config, str(tmp_path / "out"), 1, full=full)
    assert not list(tmp_path.iterdir())


def test_float16_overflow_is_refused(tmp_path):
    config = model_config()
    source = RandomSource(config, full=False)
    source.read("params/head/logits/w", (slice(None), slice(None)))[0, 0] = 1e6
    with pytest.raises(UserError, match="projection_shard/~/linear/w has values outside the range of float16"):
        write_classic(source, config, str(tmp_path / "out"), 1, dtype=np.dtype(np.float16))


def test_a_flipped_bit_is_found_by_the_read(tmp_path):
    write(tmp_path, 2)
    path = tmp_path / "shard_1/0.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    source = ClassicSource(str(tmp_path), model_config())
    with pytest.raises(DamagedCheckpoint, match=r"shard_1/0.npz: arr_1: damaged: expected CRC"):
        source.read("params/embed/tokens/w", (slice(None), slice(0, 1)))
