"""Damaged and hostile input files: each bad place is named and the rest is read, or the plan refuses the file."""

import gzip
import io
import json
import lzma
import pickle
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from support.corpora import WHOLE, as_csv, as_lines, as_parquet, as_tar, documents, parts_of, read

from mesh_transformer.data.corpus import pieces as corpus
from mesh_transformer.data.corpus.formats import csv_rows, parquet
from mesh_transformer.data.records import inflate
from mesh_transformer.dataset.parts import Bad
from mesh_transformer.errors import BadDataError, UserError

GOOD = [f"text {n} " + "é" * n for n in range(200)]
LINES = as_lines(GOOD)
# of one line
FIRST = as_lines(["first"])


def entry(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("part_bytes", [7, WHOLE])
@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        (b"{", "not JSON", "not JSON (Expecting property name"),
        (b'{"text": "x"', "not JSON", "not JSON (Expecting ',' delimiter"),
        (b'{"body": "x"}', "no text", 'neither a string nor {"text": T} where T is a string'),
        (b'{"text": 3.5}', "not text", "neither a string nor"),
        (b'{"text": {"a": "b"}}', "not text", "neither a string nor"),
        (b'{"text": ["x", 1]}', "not text", "neither a string nor"),
        (b"[]", "no text", "neither a string nor"),
        (b"12", "no text", "neither a string nor"),
        (b'"\xff\xfe"', "not JSON", "not JSON ('utf-8' codec can't decode byte 0xff"),
        (bytes(range(128, 256)), "not JSON", "not JSON ('utf-8' codec"),
        (b"\0\0\0", "not JSON", "not JSON (Expecting value"),
        (b"[" * 100_000, "not JSON", "not JSON ("),
        (b"1" * 5000, "not JSON", "not JSON (Exceeds the limit"),
        (b'{"text": "' + b"x" * 5000 + b'"}', "line too long", "longer than 4000 bytes: split it into documents"),
        (b'{"text": "x", "n": [' + b"1," * 1000 + b"1]}", "too much outside strings", "more than 1000 bytes outside"),
    ],
)
def test_bad_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, kind: str, message: str, part_bytes: int
) -> None:
    if kind in ("line too long", "too much outside strings"):
        monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 4000)
        monkeypatch.setattr(corpus, "MAX_OUTSIDE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(FIRST + line + b"\n" + as_lines(["last"]))
    # 7 bytes a part are too many parts for long lines
    first, bad, last = read(path, part_bytes=max(part_bytes, len(line) // 20))
    assert (first, last) == ("first", "last")
    assert isinstance(bad, Bad)
    assert (bad.place, bad.kind) == (f"{path}, line at byte {len(FIRST):,}", kind)
    assert bad.message.startswith(f"{bad.place}: {message}")


@pytest.mark.parametrize(
    ("name", "content", "least", "kind", "message"),
    [
        ("a.jsonl.zst", zstandard.compress(LINES)[:-7], 0, "damaged", "damaged zst data: the file ends early"),
        ("a.jsonl.zst", zstandard.compress(LINES) + b"garbage", 200, "damaged", "damaged zst data"),
        ("a.jsonl.zst", LINES, 0, "damaged", "damaged zst data"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], 0, "damaged", "damaged xz data"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-3], 200, "damaged", "damaged gzip data: the file ends early"),
        ("a.txt.gz", gzip.compress(LINES)[:-300], 0, "damaged", "damaged gzip data"),
        ("a.txt", b"fine\nbad \xff\xfe text", 0, "not UTF-8", "not UTF-8 text (invalid start byte): convert"),
        ("a.txt", b"cut \xe2\x82", 0, "not UTF-8", "not UTF-8 text (unexpected end of data)"),
        ("a.tar", as_tar({"1.txt": b"one", "2.txt": b"x" * 5000})[:3000], 1, "damaged", "damaged tar archive"),
        ("a.tar", b"x" * 2000, 0, "damaged", "damaged tar archive"),
        ("a.tar.gz", gzip.compress(as_tar({"1.txt": b"x" * 50_000}))[:100], 0, "damaged", "damaged gzip data"),
    ],
)
def test_damage_ends_a_file(tmp_path: Path, name: str, content: bytes, least: int, kind: str, message: str) -> None:
    """The documents before it are read, and the next file."""
    (tmp_path / name).write_bytes(content)
    (tmp_path / "b.txt").write_text("next")
    *before, bad, following = read(tmp_path)
    assert isinstance(bad, Bad)
    assert (bad.kind, following) == (kind, "next")
    assert message in bad.message
    assert bad.place.startswith(str(tmp_path / name))
    assert bad.message.startswith(bad.place)
    assert least <= len(before) <= len(GOOD)
    assert before == (GOOD if "jsonl" in name else ["one"])[: len(before)]


def test_a_byte_that_is_not_text_is_named(tmp_path: Path) -> None:
    content = "é".encode() * 200_000 + b"\xff"
    (tmp_path / "a.txt").write_bytes(content)
    (bad,) = read(tmp_path)
    assert isinstance(bad, Bad)
    assert bad.place == f"{tmp_path}/a.txt, byte 400,000"


def test_decompression_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflate, "_FREE_BYTES", 1 << 20)
    zeros = bytes(32 << 20)
    (tmp_path / "a.txt.zst").write_bytes(zstandard.compress(zeros))
    (tmp_path / "b.jsonl.xz").write_bytes(lzma.compress(zeros))
    (tmp_path / "c.tar").write_bytes(as_tar({"1.txt.zst": zstandard.compress(zeros), "2.txt": b"two"}))
    *bad, last = read(tmp_path)
    assert [one.kind for one in bad if isinstance(one, Bad)] == ["expands too much"] * 3
    assert last == "two"


def test_members_of_archives(tmp_path: Path) -> None:
    """Links and other entries are named and not followed; nothing is written."""
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    members: dict[str, bytes | tarfile.TarInfo] = {
        "a.txt": b"one",
        "link.txt": entry(tarfile.SYMTYPE, str(secret)),
        "hard.txt": entry(tarfile.LNKTYPE, "a.txt"),
        "../up.txt": b"up",
        "/root.txt": b"root",
        "pipe.txt": entry(tarfile.FIFOTYPE),
        "device.txt": entry(tarfile.CHRTYPE),
        "page.pdf": b"%PDF",
        "more.tar": as_tar({"b.txt": b"inside"}),
        "table.parquet": as_parquet(["x"]),
        "bad.txt": b"\xff",
        "bad.jsonl": b"{\n" + as_lines(["two"]),
        "bad.csv": b"a,b\n1,2\n",
        "cut.txt.gz": gzip.compress(b"three" * 1000)[:-20],
        "folder": entry(tarfile.DIRTYPE),
        "z.txt": b"four",
    }
    (tmp_path / "in").mkdir()
    path = tmp_path / "in/a.tar"
    path.write_bytes(as_tar(members))
    found = read(path)
    assert [one for one in found if not isinstance(one, Bad)] == ["one", "two", "four"]
    assert [(one.place.removeprefix(f"{path}: "), one.kind) for one in found if isinstance(one, Bad)] == [
        ("link.txt", "link"),
        ("hard.txt", "link"),
        ("../up.txt", "path outside"),
        ("/root.txt", "path outside"),
        ("pipe.txt", "no file"),
        ("device.txt", "no file"),
        ("page.pdf", "unknown kind"),
        ("more.tar", "unknown kind"),
        ("table.parquet", "unknown kind"),
        ("bad.txt, byte 0", "not UTF-8"),
        ("bad.jsonl, line at byte 0", "not JSON"),
        ("bad.csv", "no column"),
        ("cut.txt.gz", "damaged"),
    ]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar", "in", "secret.txt"]


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        (b'2,"a"b\n', "not CSV", "not CSV ("),
        (b"2\n", "wrong number of fields", "1 fields, not 2 as in the header: correct the row"),
        (b"2,a,b\n", "wrong number of fields", "3 fields, not 2 as in the header"),
        (b"2,\xff\n", "not UTF-8", "not UTF-8 text (invalid start byte)"),
        (b"2," + b"x" * 3000 + b"\n", "row too long", "a row of more than 2000 bytes or 50 commas"),
        (b'2,"' + b"x\n" * 1500, "row too long", "a row of more than 2000 bytes"),
        (b"," * 60 + b"\n", "row too long", "a row of more than 2000 bytes or 50 commas"),
    ],
)
def test_bad_rows_of_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: bytes, kind: str, message: str) -> None:
    monkeypatch.setattr(csv_rows, "MAX_ROW_BYTES", 2000)
    monkeypatch.setattr(csv_rows, "_MAX_COMMAS", 50)
    path = tmp_path / "a.csv"
    path.write_bytes(b"n,text\n1,one\n" + rows + b"3,three\n")
    found = read(path)
    bad = next(one for one in found if isinstance(one, Bad))
    assert (bad.place, bad.kind) == (f"{path}, row at line 3", kind)
    assert bad.message.startswith(f"{bad.place}: {message}")
    assert found[0] == "one"
    # what follows a quote that is not closed within the bound is read as it stands
    assert found[-1] == "three"


def test_a_quote_that_is_not_closed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'text\none\n"two\nthree\n')
    first, bad = read(tmp_path)
    assert first == "one"
    assert isinstance(bad, Bad)
    assert (bad.kind, bad.place) == ("not CSV", f"{tmp_path}/a.csv, row at line 3")
    assert "unexpected end of data" in bad.message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"a,b\n1,2\n", "a.csv: the header has no column 'text', it has 'a', 'b': choose one with --column"),
        ("a.csv", b"text,text\n1,2\n", "the header has several columns 'text'"),
        ("a.csv", b"\n1,2\n", "the header has no column 'text', it has nothing"),
        ("a.csv.gz", gzip.compress(as_csv(["x"], "body")), "the header has no column 'text'"),
        ("a.csv.zst", b"x" * 100, "damaged zst data"),
        ("a.csv", b"\xff\xfet\0e\0", "row at line 1: not UTF-8 text"),
        ("a.parquet", b"", "a.parquet: Parquet data that cannot be read"),
        ("a.parquet", as_parquet(GOOD)[:-40], "a.parquet: Parquet data that cannot be read"),
        ("a.parquet", as_parquet(GOOD)[:300], "a.parquet: Parquet data that cannot be read"),
        ("a.parquet", LINES, "a.parquet: Parquet data that cannot be read"),
        ("a.parquet", as_parquet(["x"], column="body"), "no column 'text', it has 'n', 'body': choose one with"),
    ],
)
def test_refused_by_the_plan(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / "0.txt").write_text("fine")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        parts_of(tmp_path)
    assert message in str(refused.value)
    assert str(tmp_path / name) in str(refused.value)


@pytest.mark.parametrize(
    ("values", "kind"), [(pa.array([1, 2]), "int64"), (pa.array([b"x"]), "binary"), (pa.array([["x"]]), "list<")]
)
def test_a_column_that_differs_between_files(tmp_path: Path, values: pa.Array, kind: str) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet(["x"]))
    pq.write_table(pa.table({"text": values}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=rf"b\.parquet: the column 'text' holds {kind}.*; allowed: strings"):
        parts_of(tmp_path)


def test_damaged_pages_drop_their_row_group(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text number {n}" for n in range(40)]
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file, row_group_size=10, write_page_checksum=True, compression="none")
    content = file.getvalue()
    at = content.index(b"text number 15")
    path.write_bytes(content[:at] + b"TEXT" + content[at + 4 :])
    found = read(path, part_bytes=1)
    assert [one for one in found if not isinstance(one, Bad)] == texts[:10] + texts[20:]
    (bad,) = [one for one in found if isinstance(one, Bad)]
    assert (bad.kind, bad.place) == ("damaged", f"{path}, row group 1 at row 10")


@pytest.mark.parametrize("pad", [0, 200_000])
def test_a_row_that_is_not_utf8(tmp_path: Path, pad: int) -> None:
    """pyarrow does not look at the bytes of a string."""
    path = tmp_path / "a.parquet"
    data = [b"one", b"x" * pad + b"\xff", b"three"]
    strings = pa.array(data, pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": strings}), path, row_group_size=1)
    first, bad, last = read(path)
    assert (first, last) == ("one", "three")
    assert isinstance(bad, Bad)
    assert (bad.kind, bad.place.startswith(f"{path}, row 1")) == ("not UTF-8", True)


def test_parquet_that_expands_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_FREE_BYTES", 1 << 20)
    table = pa.table({"text": ["x" * (16 << 20)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(UserError, match=r"a\.parquet: row group 0 expands to 16,777,\d+ bytes, which no text does"):
        parts_of(tmp_path)


def test_a_file_that_was_cut_after_the_plan(tmp_path: Path) -> None:
    """As a copy that is written over: what is read then is bad, and no error of pyarrow."""
    path = tmp_path / "a.parquet"
    path.write_bytes(as_parquet(GOOD, rows=50))
    parts = parts_of(path, part_bytes=1)
    path.write_bytes(path.read_bytes()[:-100])
    found = documents(parts)
    assert len(found) == len(parts) == 4
    assert {one.kind for one in found if isinstance(one, Bad)} == {"damaged"}


def test_an_error_travels_between_processes() -> None:
    error = BadDataError("a.txt, byte 3", "not UTF-8", "not UTF-8 text")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(copy), copy.kind) == ("a.txt, byte 3: not UTF-8 text", "not UTF-8")
    assert json.loads(json.dumps(Bad.of(copy))) == ["a.txt, byte 3", "not UTF-8", "a.txt, byte 3: not UTF-8 text"]
