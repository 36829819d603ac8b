"""A changed file loads with equal values or is refused, without a crash, a hang or a large allocation."""

import io
import shutil
import struct
import time
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.classic_folders import model_config, values, write

from mesh_transformer.checkpoint.archive import MAX_DIRECTORY_BYTES
from mesh_transformer.checkpoint.classic.npz import NpzReader
from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.errors import UserError

# the whole checkpoint has 40 kB, and a directory can have 1 MB
LIMIT_BYTES = 4 << 20
LIMIT_S = 5.0

# as fractions of the file's length
positions = st.floats(0, 1, exclude_max=True)
flips = st.lists(st.tuples(positions, st.integers(1, 255)), min_size=1, max_size=4)
numbers = st.sampled_from([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x04034B50, 1 << 20])
edits = st.one_of(
    st.tuples(st.just("flip"), flips),
    st.tuples(st.just("cut"), positions),
    st.tuples(st.just("number"), st.tuples(positions, numbers)),
    st.tuples(
        st.just("text"),
        st.sampled_from(
            [
                (b"<f4", b"|O8"),
                (b"<f4", b"<f8"),
                (b"<f4", b"<V2"),
                (b"(16", b"(99"),
                (b"(12, 16", b"(16, 12"),
                (b"shape", b"Shape"),
                (b"False", b"True "),
                (b"arr_0", b"arr_1"),
                (b"arr_0", b"/etc/"),
                (b"\x93NUMPY\x01", b"\x93NUMPY\x02"),
                (b"PK\x01\x02", b"PK\x03\x04"),
            ]
        ),
    ),
    st.tuples(st.just("insert"), st.tuples(positions, st.binary(min_size=1, max_size=40))),
)


def mutated(content: bytes, kind: str, what) -> bytes:
    def at(position):
        return int(position * len(content))

    data = bytearray(content)
    if kind == "flip":
        for position, mask in what:
            data[at(position)] ^= mask
    elif kind == "cut":
        del data[at(what) :]
    elif kind == "number":
        start = min(at(what[0]), len(data) - 4)
        data[start : start + 4] = struct.pack("<I", what[1])
    elif kind == "text":
        data = data.replace(*what)
    else:
        data[at(what[0]) : at(what[0])] = what[1]
    return bytes(data)


@pytest.fixture(
    scope="module",
    params=[pytest.param(False, id="stored", marks=pytest.mark.nightly), pytest.param(True, id="compressed")],
)
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("damage")
    write(folder, 2, full=False)
    if request.param:
        for path in folder.glob("*/*.npz"):
            np.savez_compressed(path, *dict(np.load(path)).values())
    return folder


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edit=edits, shard=st.integers(0, 1), number=st.sampled_from([0, 1, 5, 15]))
def test_every_mutation_is_equal_or_refused(folder, edit, shard, number):
    config = model_config()
    expected = values(ClassicSource(str(folder), config))
    path = folder / f"shard_{shard}/{number}.npz"
    whole = path.read_bytes()
    path.write_bytes(mutated(whole, *edit))
    began = time.process_time()
    tracemalloc.start()
    try:
        found = values(ClassicSource(str(folder), config))
        assert found.keys() == expected.keys()
        assert all(array.tobytes() == expected[name].tobytes() for name, array in found.items())
    except UserError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        path.write_bytes(whole)
    assert peak < LIMIT_BYTES
    assert time.process_time() - began < LIMIT_S


def test_a_large_directory_is_not_read(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    path = copy / "shard_0/0.npz"
    content = path.read_bytes()
    end = content.rindex(b"PK\x05\x06")
    huge = content[:end] + bytes(1 << 24) + content[end:]
    at = huge.rindex(b"PK\x05\x06")
    huge = huge[: at + 12] + struct.pack("<I", at - struct.unpack_from("<I", huge, at + 16)[0]) + huge[at + 16 :]
    path.write_bytes(huge)
    with pytest.raises(UserError, match="its directory has"):
        ClassicSource(str(copy), model_config())


# 5 MiB
BIG = (640, 2048)


def compressed(path: Path, values: np.ndarray) -> bytes:
    np.savez_compressed(path, values)
    return path.read_bytes()


def read(path: Path) -> np.ndarray:
    reader = NpzReader()
    member = reader.open(str(path))["arr_0"]
    out = np.empty(member.shape, member.dtype)
    reader.read(member, (slice(None),) * out.ndim, out)
    return out


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_large_compressed_array_is_read_in_blocks(tmp_path, order):
    values = np.asarray(np.random.default_rng(0).normal(size=BIG).astype(np.float32), order=order)
    assert len(compressed(tmp_path / "x.npz", values)) > 4 * MAX_DIRECTORY_BYTES
    tracemalloc.start()
    found = read(tmp_path / "x.npz")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.tobytes() == values.tobytes()
    # the values, the array that they are copied to, and some blocks
    assert peak < 2 * values.nbytes + (3 << 20)


def test_an_array_with_the_maximal_compression_is_read(tmp_path):
    assert len(compressed(tmp_path / "x.npz", np.zeros(BIG, np.float32))) < 8000
    assert not read(tmp_path / "x.npz").any()


def edited(content: bytes, **values: int) -> bytes:
    """Change the size or the CRC in the only entry of the directory."""
    at, data = content.rindex(b"PK\x01\x02"), bytearray(content)
    for name, value in values.items():
        struct.pack_into("<I", data, at + {"crc": 16, "size": 24}[name], value)
    return bytes(data)


def misdeclared(path: Path, declared: bytes, contained: bytes) -> Path:
    """Write an archive whose directory has the size and the CRC of other contents."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("arr_0.npy", contained)
    path.write_bytes(edited(path.read_bytes(), size=len(declared), crc=zlib.crc32(declared)))
    return path


def npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, values)
    return file.getvalue()


def test_data_that_inflates_to_more_than_declared_is_refused(tmp_path):
    """Refused even if the CRC is that of the declared part, and without inflating the rest."""
    declared = npy(np.zeros(2048, np.float32))
    path = misdeclared(tmp_path / "bomb.npz", declared, declared + bytes(64 << 20))
    tracemalloc.start()
    with pytest.raises(UserError, match="inflates to more than its declared 8320 bytes"):
        read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < LIMIT_BYTES


def test_data_that_inflates_to_less_than_declared_is_refused(tmp_path):
    declared = npy(np.random.default_rng(0).normal(size=100).astype(np.float32))
    with pytest.raises(UserError, match="4 of 528 declared bytes are missing"):
        read(misdeclared(tmp_path / "short.npz", declared, declared[:-4]))


def test_an_impossible_compression_is_refused_before_anything_is_inflated(tmp_path):
    content = compressed(tmp_path / "x.npz", np.zeros(BIG, np.float32))
    (tmp_path / "x.npz").write_bytes(edited(content, size=0xFFFFFFF0))
    with pytest.raises(UserError, match="4294967280 bytes declared, .*its sizes are wrong"):
        read(tmp_path / "x.npz")
