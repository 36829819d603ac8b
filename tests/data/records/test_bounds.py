"""Small files that claim or become much: archives, JSON lines and compressed text from strangers."""

import gzip
import io
import json
import tarfile
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zstandard

from mesh_transformer.data.corpus import pieces as corpus
from mesh_transformer.data.corpus.pieces import MAX_OUTSIDE_BYTES, cut, file_pieces
from mesh_transformer.data.records import inflate
from mesh_transformer.data.records.inflate import inflated
from mesh_transformer.dataset.parts import Bad, FilePart
from mesh_transformer.dataset.parts import pieces as part_items
from mesh_transformer.errors import UserError

END = bytes(2 * tarfile.BLOCKSIZE)
# the decompressor gives out what becomes of 1 KiB at once: 32 MiB of zeros
MOST_BYTES = 48 << 20


def header(name: str = "a.txt", size: int = 0, kind: bytes = tarfile.REGTYPE) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % tarfile.BLOCKSIZE)


def pax(values: dict[str, str], kind: bytes = tarfile.XHDTYPE) -> bytes:
    """An extended header; four digits are enough for the length of any of these."""
    data = b"".join(b"%04d %s=%s\n" % (len(k) + len(v) + 7, k.encode(), v.encode()) for k, v in values.items())
    return header("x", len(data), kind) + padded(data)


def texts(path: Path) -> list[str]:
    return [piece.text for piece in file_pieces(str(path), None)]


@contextmanager
def memory_below(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["a.txt", "a.bin"])
@pytest.mark.parametrize("claim", [2**70, 5000])
def test_a_member_that_ends_early(tmp_path: Path, name: str, claim: int) -> None:
    """Whether it is read, or passed over: tarfile would look for 2**70 bytes one block after the other."""
    (tmp_path / "a.tar").write_bytes(header(name, claim) + b"x" * 1024)
    with pytest.raises(UserError, match=r"a\.tar.*: damaged tar archive: (unexpected end|it ends inside)"):
        texts(tmp_path / "a.tar")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_long_headers_fill_no_memory(tmp_path: Path, kind: bytes) -> None:
    claim = 1 << 28
    bomb = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(bomb, closefd=False) as writer:
        writer.write(header("x", claim, kind))
        for _ in range(claim >> 24):
            writer.write(bytes(1 << 24))
        writer.write(header() + END)
    assert len(bomb.getvalue()) < 20_000
    (tmp_path / "a.tar.zst").write_bytes(bomb.getvalue())
    with memory_below(MOST_BYTES), pytest.raises(UserError, match="more than 16 KiB of headers"):
        texts(tmp_path / "a.tar.zst")


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE])
def test_headers_within_headers_do_not_nest_without_end(tmp_path: Path, kind: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(header("x", 0, kind) * 1200 + header() + END)
    with pytest.raises(UserError, match="more than 16 KiB of headers"):
        texts(tmp_path / "a.tar")


def test_many_members_fill_no_memory(tmp_path: Path) -> None:
    """Each with a global header that adds a name."""
    members = (pax({f"k{k}": "v" * 3000}, tarfile.XGLTYPE) + header("a.bin") for k in range(1500))
    (tmp_path / "a.tar").write_bytes(b"".join(members) + END)
    with memory_below(1 << 20):
        assert texts(tmp_path / "a.tar") == []


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    """It may claim any number of zeros."""
    claim = pax({"GNU.sparse.size": str(2**60), "GNU.sparse.map": f"0,5,{2**60},0"})
    (tmp_path / "a.tar").write_bytes(claim + header("a.txt", 5) + padded(b"alpha") + END)
    with pytest.raises(UserError, match=r"a\.tar: a\.txt is a sparse file"):
        texts(tmp_path / "a.tar")


@pytest.mark.parametrize("values", [{"GNU.sparse.map": "0,1,"}, {"GNU.sparse.realsize": "9" * 4400}])
def test_numbers_of_a_sparse_file_that_are_none(tmp_path: Path, values: dict[str, str]) -> None:
    (tmp_path / "a.tar").write_bytes(pax(values) + header("a.txt", 5) + padded(b"alpha") + END)
    with pytest.raises(UserError, match=r"a\.tar: damaged tar archive"):
        texts(tmp_path / "a.tar")


@pytest.mark.parametrize("damaged", [b"?" * tarfile.BLOCKSIZE + END, header("b.txt", 4)[:100]])
def test_a_damaged_header_does_not_end_an_archive_in_silence(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(header("a.txt", 5) + padded(b"alpha") + damaged)
    with pytest.raises(UserError, match=r"a\.tar: damaged tar archive"):
        texts(tmp_path / "a.tar")


def test_json_lines_are_utf_8(tmp_path: Path) -> None:
    """The bound counts bytes outside strings, which it cannot find in UTF-16."""
    (tmp_path / "a.jsonl").write_bytes('{"text": "alpha"}'.encode("utf-8-sig"))
    assert texts(tmp_path / "a.jsonl") == ["alpha"]
    (tmp_path / "a.jsonl").write_bytes('{"text": "alpha"}'.encode("utf-16-le"))
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: not JSON"):
        texts(tmp_path / "a.jsonl")


def test_long_paths_and_links_are_real(tmp_path: Path) -> None:
    """Paths and links of 4,000 characters, in both ways of writing them, attributes, and a member longer than a
    step."""
    long, text = "d" * 3990 + "/a.txt", b"some text. " * 3000
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=kind, pax_headers={"comment": "c" * 40}) as archive:
            link = tarfile.TarInfo("l" * 4000)
            link.type, link.linkname = tarfile.SYMTYPE, "t" * 4000
            archive.addfile(link)
            for _ in range(3):
                info = tarfile.TarInfo(long)
                info.size, info.pax_headers = len(text), {"SCHILY.xattr.user.note": "n" * 4000}
                archive.addfile(info, io.BytesIO(text))
        assert texts(tmp_path / "a.tar") == [text.decode()] * 3


def notes(count: int) -> str:
    return '{"text": "fine", "notes": [' + "[]," * count + "[]]}\n"


def test_lists_beside_a_text_fill_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(notes(10) + notes(MAX_OUTSIDE_BYTES // 3))
    # the line itself, and not 31 times as much
    with (
        memory_below(5 * MAX_OUTSIDE_BYTES),
        pytest.raises(UserError, match="line 2: more than 4194304 bytes outside strings"),
    ):
        texts(path)


@pytest.mark.parametrize(
    ("line", "allowed"),
    [
        (json.dumps({"text": '[],"\\' * 500}), True),
        (json.dumps({"text": "x" * 2000, "spans": [[k, k + 1] for k in range(60)]}), True),
        (json.dumps({"text": "x", "spans": [[k, k + 1] for k in range(120)]}), False),
        (json.dumps({"text": "x", "words": ["ab"] * 600}), False),
        (json.dumps({"text": "x", **{f"{k:09d}": 1 for k in range(600)}}), False),
        ('"' + '\\"' * 1000, True),
        ('{"text": "x"}' + " " * 1500, False),
    ],
    ids=[
        "brackets in a text",
        "some spans",
        "many spans",
        "many words",
        "many keys",
        "without end",
        "blanks",
    ],
)
def test_what_is_outside_of_strings(monkeypatch: pytest.MonkeyPatch, line: str, allowed: bool) -> None:
    monkeypatch.setattr(corpus, "MAX_OUTSIDE_BYTES", 1000)
    assert corpus._has_too_much_outside(line.encode()) is not allowed


def test_the_sum_of_what_a_file_becomes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a ratio that deflate cannot reach."""
    monkeypatch.setattr(inflate, "_FREE_BYTES", 1 << 20)
    zeros = bytes(1 << 24)
    with inflated(io.BytesIO(gzip.compress(zeros)), "gzip", "a.gz") as stream:
        assert stream.read() == zeros
    with (
        inflated(io.BytesIO(zstandard.compress(zeros)), "zst", "a.zst") as stream,
        pytest.raises(UserError, match=r"a\.zst: \d+ bytes expand to \d+ and more"),
    ):
        stream.read()


@pytest.mark.parametrize("archive", ["tar", "tar.zst"])
@pytest.mark.parametrize("reader", ["records", "prepare"])
def test_the_members_of_an_archive_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, archive: str, reader: str
) -> None:
    """Each of five members becomes less than the bound."""
    monkeypatch.setattr(inflate, "_FREE_BYTES", 1 << 22)
    member = zstandard.compress(b"0" * (1 << 20))
    content = b"".join(header(f"{n}.txt.zst", len(member)) + padded(member) for n in range(5)) + END
    path = tmp_path / f"a.{archive}"
    path.write_bytes(content if archive == "tar" else zstandard.compress(content))
    if reader == "records":
        with pytest.raises(UserError, match=r"[34]\.txt\.zst: \d+ bytes expand to \d+ and more"):
            texts(path)
        return
    items = list(part_items(FilePart(0, str(path), "tar", 0, path.stat().st_size, path.stat().st_size), "text"))
    assert {item.kind for item in items if isinstance(item, Bad)} == {"expands too much"}


def test_the_time_for_a_line_without_spaces_grows_with_its_length() -> None:
    """Not with its square: 65 s for 63 MiB."""

    def seconds(length: int) -> float:
        before = time.process_time()
        assert sum(len(piece.text) for piece in cut(["x" * length], None)) == length
        return time.process_time() - before

    # a square would be 64 times
    assert seconds(1 << 26) < 30 * max(0.01, min(seconds(1 << 23) for _ in range(3)))
