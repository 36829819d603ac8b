"""The header of a GGUF file: what is read, and what is refused at once."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support import gguf_files

from mesh_transformer.errors import UserError
from mesh_transformer.gguf import header as header_module
from mesh_transformer.gguf.header import read_header
from mesh_transformer.gguf.parts import open_parts, part_names, stem

U32, U64, TEXT, ARRAY = 4, 10, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


def tensor(name: str, shape: tuple[int, ...] = (4,), kind: int = 0, start: int = 0) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, start)


def content(*metadata: bytes, tensors: tuple[bytes, ...] = (), data: int = 0, version: int = 3, **counts: int) -> bytes:
    numbers = counts.get("tensors_said", len(tensors)), counts.get("metadata_said", len(metadata))
    head = b"GGUF" + struct.pack("<IQQ", version, *numbers) + b"".join(metadata) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


def test_values_are_those_of_the_package(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "a.text": "é", "a.true": True, "a.small": 7, "a.negative": -(2**40), "a.float": 0.5, "a.texts": ["x", "yé", ""],
        "a.numbers": [1, 2, 3], "a.switches": [True, False],
    }  # fmt: skip
    path = gguf_files.write(tmp_path / "a.gguf", "llama", values, {"x": np.ones((3, 2), np.float32)})
    header = read_header(str(path))
    for key, value in values.items():
        read = header.metadata[key]
        assert (read.tolist() if isinstance(read, np.ndarray) else read) == value
    (stored,) = header.tensors.values()
    theirs = gguf.GGUFReader(path).tensors[0]
    assert (stored.name, stored.shape, stored.start) == ("x", (3, 2), theirs.data_offset)


def test_a_long_header_is_read_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "_FIRST_BYTES", 64)
    tokens = [f"token {number}" for number in range(1000)]
    path = gguf_files.write(tmp_path / "a.gguf", "llama", {"tokens": tokens}, {"x": np.ones((3, 2), np.float32)})
    assert read_header(str(path)).metadata["tokens"] == tokens


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        (b"", "it is not a GGUF file|its header needs"),
        (b"GGML" + bytes(60), "it is not a GGUF file"),
        (content(version=1), "GGUF version 1 is not read, only 2 and 3"),
        (content(version=3 << 24), "a big-endian GGUF file is not read"),
        (content(tensors_said=2**40), "it has 1099511627776 tensors: at most"),
        (content(metadata_said=2**40), "it has 1099511627776 metadata keys: at most"),
        (content(metadata_said=3), "the file is cut or damaged"),
        (content(entry("k", 99, b"")), "k has the type 99"),
        (content(entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1))), "k is a list of the type 9"),
        (content(entry("k", ARRAY, struct.pack("<IQ", TEXT, 2**60))), "its header needs 9223372036854775808 bytes"),
        (content(entry("k", ARRAY, struct.pack("<IQ", U32, 2**60))), "its header needs 4611686018427387904 bytes"),
        (content(entry("k", TEXT, struct.pack("<Q", 2**63))), "k has 9223372036854775808 bytes"),
        (content(entry("k", TEXT, struct.pack("<Q", 1) + b"\xff")), "k is not UTF-8"),
        (content(entry("k", U32, bytes(4)), entry("k", U32, bytes(4))), "the metadata key k is there twice"),
        (content(entry("general.alignment", U32, struct.pack("<I", 3))), "general.alignment is 3"),
        (content(tensors=(tensor("x"), tensor("x", start=32)), data=64), "x is there twice"),
        (content(tensors=(tensor("x"), tensor("y")), data=64), "y overlaps the tensor before it"),
        (content(tensors=(tensor("x", start=8),), data=64), "x begins at 8, no multiple of 32"),
        (content(tensors=(tensor("x", (99,)),), data=64), "x ends at byte .* and the file at .*: the file is cut"),
        (content(tensors=(tensor("x", (2**40, 2**40)),), data=64), "x has the shape"),
        (content(tensors=(tensor("x", (0,)),), data=64), "x has the shape"),
        (content(tensors=(tensor("x", (1,) * 5),), data=64), "x has 5 dimensions: expected 1 to 4"),
        (content(tensors=(tensor("x", kind=4),), data=64), "x has the type 4, which is not known"),
        (content(tensors=(tensor("x", (31,), kind=2),), data=64), "rows of 31 are no blocks of 32, as Q4_0 needs"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, file: bytes, reason: str) -> None:
    (tmp_path / "a.gguf").write_bytes(file)
    with pytest.raises(UserError, match=reason):
        read_header(str(tmp_path / "a.gguf"))


@pytest.mark.parametrize("kept", [0, 3, 10, 50, 200, 0.5, -1])
def test_a_cut_file_is_refused(tmp_path: Path, kept: float) -> None:
    metadata, tensors = gguf_files.llama(32, width=32)
    path = gguf_files.write(tmp_path / "a.gguf", "llama", metadata, tensors)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(UserError, match="cut|not a GGUF file"):
        read_header(str(path))


def parts(folder: Path, count: int = 3, **changes: Any) -> list[Path]:
    """The parts of a file, as llama.cpp's gguf-split writes them."""
    metadata, tensors = gguf_files.llama(32, width=32)
    names, paths = list(tensors), []
    for number in range(count):
        split = {"split.no": number, "split.count": count, "split.tensors.count": len(names), **changes}
        path = folder / f"m-{number + 1:05d}-of-{count:05d}.gguf"
        chosen = {name: tensors[name] for name in names[number::count]}
        paths.append(gguf_files.write(path, "llama", {**(metadata if number == 0 else {}), **split}, chosen))
    return paths


def test_parts_are_read_together(tmp_path: Path) -> None:
    paths = parts(tmp_path)
    _, tensors = gguf_files.llama(32, width=32)
    for path in paths:
        header = open_parts(str(path))
        assert header.tensors.keys() == tensors.keys()
        assert header.metadata["llama.block_count"] == 1
    paths[1].unlink()
    with pytest.raises(UserError, match="is one of 3 parts, of which are missing: .*m-00002-of-00003.gguf"):
        open_parts(str(paths[0]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"split.tensors.count": 99}, "split.tensors.count is 99"), ({"split.no": 0}, "it says that it is part 0")],
)
def test_parts_of_something_else(tmp_path: Path, changes: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        open_parts(str(parts(tmp_path, **changes)[0]))


def test_names_of_parts() -> None:
    assert part_names("m.gguf") == ["m.gguf"]
    assert part_names("a/m-00002-of-00002.gguf") == ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"]
    assert (stem("a/m-00002-of-00003.gguf"), stem("a/m.Q4_1.gguf"), stem("sha256-1f")) == ("m", "m.Q4_1", "sha256-1f")
    with pytest.raises(UserError, match="1 to 1000 parts, not 99999"):
        part_names("m-00001-of-99999.gguf")
