"""A changed native step loads with equal values or is refused, without a crash, a hang or a large allocation."""

import json
import shutil
import time
import tracemalloc
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.classic_folders import RandomSource, model_config
from support.mutations import manifest_of, mutated_bytes, mutated_json

from mesh_transformer.checkpoint.native import source as native
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.errors import UserError

# the whole checkpoint has 200 kB
LIMIT_BYTES = 4 << 20
LIMIT_S = 5.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = RandomSource(model_config(layers=1, d_model=8, n_heads=2), full=True)
    source.extra = {"aux": {"train_loader": {"used": [], "file_idx": 1}}}
    return Path(write_native(source, str(tmp_path_factory.mktemp("run"))))


def read_all(folder: Path) -> dict[str, Any]:
    source = NativeSource(str(folder))
    values = {name: source.read(name, (slice(None),) * len(info.shape)) for name, info in source.tensors.items()}
    return {**values, "counts": source.counts, "extra": source.extra}


@pytest.fixture(scope="module")
def expected(whole: Path) -> dict[str, Any]:
    return read_all(whole)


def outcome(folder: Path) -> dict[str, Any]:
    """The values read from a folder that may be damaged, or {} if it is refused, within limits of time and memory."""
    began = time.process_time()
    values, peak = measured(folder)
    assert time.process_time() - began < LIMIT_S
    if peak >= LIMIT_BYTES:
        # the peak includes what threads of earlier tests allocate meanwhile; a reader's own peak is there again
        values, peak = measured(folder)
    assert peak < LIMIT_BYTES
    return values


def measured(folder: Path) -> tuple[dict[str, Any], int]:
    """The values, or {} if the folder is refused, and the largest memory allocated meanwhile."""
    tracemalloc.start()
    try:
        values = read_all(folder)
    except UserError:
        values = {}
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return values, peak


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_another_manifest_with_the_right_crc(
    whole: Path, expected: dict[str, Any], tmp_path: Path, random: Random
) -> None:
    body = json.loads((whole / "manifest/metadata").read_text())["body"]
    copied = shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True)
    (copied / "manifest/metadata").write_bytes(manifest_of(mutated_json(random, body, large=False)))
    found = outcome(copied)
    for name in found.keys() & expected.keys() - {"extra"}:
        np.testing.assert_equal(found[name], expected[name])


def test_a_manifest_without_a_step_is_refused(whole: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(whole, tmp_path / "copy")
    body = json.loads((whole / "manifest/metadata").read_text())["body"]
    body["tensors"] = {}
    crc = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    (copied / "manifest/metadata").write_text(json.dumps({"crc32": crc, "body": body}))
    with pytest.raises(DamagedCheckpoint, match="the manifest lists no step"):
        read_all(copied)


@pytest.mark.parametrize(
    "raw",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"crc32": 1, "body": ' + "[" * 20_000 + "]" * 20_000 + "}",
        "[]", "3", "null", '"x"', "", "\x00", '{"crc32": 1, "body": 2}', '{"crc32": 1e999, "body": {}}', "9" * 5000,
    ],
    ids=lambda raw: raw[:12],
)  # fmt: skip
def test_invalid_manifests_are_refused(whole: Path, tmp_path: Path, raw: str) -> None:
    copied = shutil.copytree(whole, tmp_path / "copy")
    (copied / "manifest/metadata").write_text(raw)
    with pytest.raises(DamagedCheckpoint, match="manifest"):
        NativeSource(str(copied))


def test_brackets_of_any_depth(whole: Path, tmp_path: Path) -> None:
    """A document that the JSON parser accepts can be nested too deeply for the computation of the CRC."""
    copied = shutil.copytree(whole, tmp_path / "copy")
    for depth in range(1, 1100):
        nested = "[" * depth + "]" * depth
        (copied / "manifest/metadata").write_text(f'{{"crc32": 0, "body": {nested}}}')
        with pytest.raises(DamagedCheckpoint, match="manifest"):
            NativeSource(str(copied))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(random=st.randoms(use_true_random=False))
def test_changed_files(whole: Path, expected: dict[str, Any], tmp_path: Path, random: Random) -> None:
    copied = shutil.copytree(whole, tmp_path / "copy", dirs_exist_ok=True)
    path = random.choice(sorted(path for path in copied.rglob("*") if path.is_file()))
    content = mutated_bytes(random, path.read_bytes())
    path.unlink()
    if random.random() < 0.8:
        path.write_bytes(content)
    try:
        np.testing.assert_equal(outcome(copied) or expected, expected)
    finally:
        shutil.rmtree(copied)


@pytest.mark.parametrize(
    ("zarray", "message"),
    [
        ({"chunks": [1 << 20, 1 << 20]}, "chunks of .* are over"),
        ({"shape": [8, 9]}, r"expected \(.*\) float32, found"),
        ({"dtype": "<i4"}, "found .* int32"),
        ({"compressor": {"id": "none of them"}}, "none of them"),
        ({"compressor": {"id": "zlib", "level": 1}}, "compressed with zlib; only zstd and none are read"),
        ({"chunks": [1, 1]}, r"has [\d,]+ chunks of \(1, 1\), at most 100 are read"),
    ],
)
def test_an_array_that_differs_from_the_manifest_is_refused(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zarray: Any, message: str
) -> None:
    import tensorstore as ts

    monkeypatch.setattr(native, "MAX_CHUNKS", 100)
    copied = shutil.copytree(whole, tmp_path / "copy")
    store = ts.KvStore.open(native.ocdbt(str(copied / "state"))).result()
    key = "params.embed.tokens.w/.zarray"
    store[key] = json.dumps({**json.loads(store[key]), **zarray}).encode()
    source = NativeSource(str(copied))
    with pytest.raises(DamagedCheckpoint, match=message):
        source.read("params/embed/tokens/w", (slice(0, 1), slice(0, 1)))


def test_a_flipped_bit_is_found_by_the_first_read_of_a_slice(whole: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(whole, tmp_path / "copy")
    source = NativeSource(str(whole))
    needle = source.read("params/embed/tokens/w", (slice(20, 24), slice(0, 8))).tobytes()
    (file,) = [path for path in (copied / "state/d").iterdir() if needle in path.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(needle) + 17] ^= 4
    file.write_bytes(content)
    damaged = NativeSource(str(copied))
    np.testing.assert_array_equal(
        damaged.read("mu/embed/tokens/w", (slice(0, 9), slice(3, 8))),
        source.read("mu/embed/tokens/w", (slice(0, 9), slice(3, 8))),
    )
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match="wrong checksum of params/embed/tokens/w"):
            damaged.read("params/embed/tokens/w", (slice(0, 1), slice(0, 8)))
