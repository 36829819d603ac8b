"""Formats of input files against the readers of Python and pyarrow, and the memory that they take."""

import csv
import gzip
import io
import json
import lzma
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import as_csv, as_lines, as_parquet, as_tar, parts_of, read

from mesh_transformer.data.corpus.formats import FORMATS, allowed, array, format_of, parquet
from mesh_transformer.data.corpus.pieces import PIECE_CHARS
from mesh_transformer.dataset.parts import Bad, pieces
from mesh_transformer.errors import UserError

COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}
CELLS = st.text(st.one_of(st.sampled_from("\",\n\r;' \t"), st.characters(codec="utf-8")), max_size=12)


@settings(max_examples=80)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), max_size=8),
    # the writer does not quote a carriage return where rows end without one
    style=st.sampled_from([(csv.QUOTE_MINIMAL, "\r\n"), (csv.QUOTE_ALL, "\r\n"), (csv.QUOTE_ALL, "\n")]),
    mark=st.sampled_from(["", "\ufeff"]),
)
def test_rows_are_those_of_pythons_csv(rows: list[tuple[str, str]], style: tuple[int, str], mark: str) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=style[0], lineterminator=style[1]).writerows([("id", "text"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_text(mark + file.getvalue(), encoding="utf-8", newline="")
        with open(path, encoding="utf-8-sig", newline="") as whole:
            expected = [row["text"] for row in csv.DictReader(whole)]
        assert expected == [text for _, text in rows]
        assert read(path) == expected


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.text(st.sampled_from('ab"\\[]{},:\n é😀'), max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('a]"', max_size=2), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150)
@given(
    values=st.lists(VALUES, max_size=4),
    style=st.sampled_from([{"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}]),
    around=st.sampled_from([(b"", b""), (b"\xef\xbb\xbf", b"\n"), (b"\n \t", b" \r\n")]),
    step=st.sampled_from([5, 8, 1 << 20]),
)
def test_elements_are_those_of_pythons_json(values: list, style: dict, around: tuple[bytes, bytes], step: int) -> None:
    content = json.dumps(values, **style).encode().join(around)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array, "_STEP_BYTES", step)
        elements = list(array._elements(io.BytesIO(content), "a.json"))
    assert [json.loads(element) for _, element in elements] == values
    # each is at its place
    assert all(content[at:].startswith(element) for at, element in elements)


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_json_array_is_read(tmp_path: Path, suffix: str) -> None:
    content = json.dumps([{"text": "one"}, "two", {"text": None}, {"text": ["a", "b"]}], indent=1).encode()
    path = tmp_path / f"a.json{suffix}"
    path.write_bytes(COMPRESS[suffix](content) if suffix else content)
    assert read(path) == ["one", "two", None, "a\n\nb"]


def test_an_element_is_as_long_as_a_line_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_transformer.data.corpus.pieces.MAX_LINE_BYTES", 100)
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": "x" * 100}, {"text": "two"}, 5]))
    (part,) = parts_of(path)
    first, too_long, second, wrong = pieces(part, "text")
    assert (first.text, second.text) == ("one", "two")
    assert (too_long.kind, too_long.place) == ("line too long", f"{path}, element at byte 17")
    assert wrong.kind == "no text"


def complaint(folder: Path) -> str:
    """What is said of the files: before they are read, or of their bad places."""
    try:
        items = [item for part in parts_of(folder) for item in pieces(part, "text")]
    except UserError as error:
        return str(error)
    return " ".join(item.message for item in items if isinstance(item, Bad))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.json",
            b'{"text": "a"}',
            "no JSON array: expected \\[ at its start; name a file with an object a line .jsonl",
        ),
        ("a.json", b'["a", "b"', "the array is not closed"),
        ("a.json", b'["a"}, "b"]', "a bracket that nothing opens, at byte 4"),
        ("a.json", b'["a",]', "element at byte 5: not JSON"),
        ("a.json", b'["a"]' + b" " * (1 << 20) + b"x", "more text after the array, at byte 5"),
        ("a.jsonl", b'[{"text": "a"},\n {"text": "b"}]', "a JSON array: write one object a line, or name a file"),
        ("a.jsonl", b'["a"]', "a JSON array: write one object a line"),
    ],
)
def test_what_is_no_array_is_said(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert re.search(message, complaint(tmp_path))


def test_other_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(["one"], "body"))
    (tmp_path / "b.csv").write_bytes(as_csv(["two"], "body"))
    (tmp_path / "c.parquet").write_bytes(as_parquet(["three"], column="body"))
    assert read(tmp_path, column="body") == ["one", "two", "three"]


@pytest.mark.parametrize("content", [b"a\r\nb\rc\n", b"\xef\xbb\xbfa", b"", "é€😀".encode() * 50_000, b"\r", b"\n\n"])
def test_a_text_is_what_python_reads(tmp_path: Path, content: bytes) -> None:
    """As `open` reads it, with every end of a line as a line feed."""
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"x")
    text = (tmp_path / "a.txt").read_text(encoding="utf-8-sig")
    assert read(tmp_path) == ([text] if content else []) + ["x"]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_files_and_archives(tmp_path: Path, suffix: str) -> None:
    """A compressed file is one part, also where the plain one has many."""
    texts = [f"text {n} é" for n in range(9)]
    inner = {"a.jsonl": as_lines(texts), "b.csv": as_csv(["x\ny", "z"]), "c.txt": b"whole"}
    inner |= {f"{name}{suffix}": COMPRESS[suffix](content) for name, content in inner.items()}
    outer = {**inner, "d.tar": as_tar({f"folder/{name}": content for name, content in inner.items()})}
    expected = []
    for name, content in sorted({**outer, f"e.tar{suffix}": COMPRESS[suffix](outer["d.tar"])}.items()):
        (tmp_path / name).write_bytes(content)
        plain = {"a": texts, "b": ["x\ny", "z"], "c": ["whole"]}
        archive = [text for key in inner for text in plain[key[0]]]
        expected += plain.get(name[0], archive)
    assert read(tmp_path, part_bytes=50) == expected
    assert len(parts_of(tmp_path, part_bytes=50)) == len(parts_of(tmp_path)) - 1 + len(
        parts_of(tmp_path / "a.jsonl", part_bytes=50)
    )


def test_hidden_members_and_folders_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(as_tar({"a.txt": b"one", "x/.b.txt": b"two", ".DS_Store": b"three"}))
    assert read(tmp_path) == ["one"]


TEXTS = ["one", None, "", "é€😀", "\r\n", "two" * 1000]


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)
@pytest.mark.parametrize("compression", ["none", "zstd", "snappy"])
def test_kinds_of_strings(tmp_path: Path, kind: pa.DataType, compression: str) -> None:
    values = pa.array(TEXTS, pa.string()).cast(kind)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": values}), path, row_group_size=4, compression=compression)
    assert read(path) == TEXTS == pq.read_table(path)["text"].to_pylist()


def test_columns_with_dots_and_nested_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a.text": ["x"], "a": [{"text": "y"}], "text": ["z"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["z"]
    with pytest.raises(UserError, match="the column 'a' holds struct<text: string>; allowed: strings"):
        read(tmp_path / "a.parquet", column="a")


def test_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet([]))
    (tmp_path / "b.txt").write_text("x")
    assert read(tmp_path) == ["x"]


@pytest.mark.parametrize("name", ["a.jsonl", "b.parquet", "c.csv", "d.txt"])
def test_long_documents_come_in_pieces(tmp_path: Path, name: str) -> None:
    text = "some words é " * 60_000
    write = {"a": lambda t: as_lines([t]), "b": lambda t: as_parquet([t]), "c": lambda t: as_csv([t]), "d": str.encode}
    (tmp_path / name).write_bytes(write[name[0]](text))
    found = [piece for part in parts_of(tmp_path) for piece in pieces(part, "text")]
    assert not any(isinstance(piece, Bad) for piece in found)
    assert "".join(piece.text for piece in found) == text
    assert [piece.ends for piece in found] == [False] * (len(found) - 1) + [True]
    assert max(len(piece.text) for piece in found) <= 2 * PIECE_CHARS


def test_large_row_groups_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = ["x", "y", "".join(map(str, range(2000))), "z"]
    (tmp_path / "a.parquet").write_bytes(as_parquet(texts, rows=2))
    monkeypatch.setattr(parquet, "LARGE_BYTES", 1000)
    parts_of(tmp_path)
    assert "a.parquet: more than 1 kB in row group 1;" in caplog.text


def test_the_table_of_formats() -> None:
    assert allowed() == ".jsonl, .json, .csv, .txt, .tar (each also with .gz, .xz, .zst appended), .parquet"
    assert {format_of(f"x{format.suffix}") for format in FORMATS.values()} == set(FORMATS)
    assert format_of("a/b.TXT.GZ") == "text"
    assert [format_of(name) for name in ("x.parquet.gz", "x", "x.gz", "x.yaml", "txt", "x.txt.bz2")] == [None] * 6


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(as_parquet(["x"]))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"a\.parquet: pyarrow is not installed: pip install -e '\.\[parquet\]'"):
        parts_of(tmp_path)


CHILD = """
import json, re, sys
from mesh_transformer.dataset.inputs import read_inputs
from mesh_transformer.dataset.parts import pieces, plan
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10
if sys.argv[1].endswith(".parquet"):
    import pyarrow.parquet
before = peak()
chars = longest = 0
for part in plan(read_inputs([sys.argv[1]]), 1 << 28):
    for piece in pieces(part, "text"):
        chars, longest = chars + len(piece.text), max(longest, len(piece.text))
print(json.dumps([chars, longest, peak() - before]))
"""


def measured(path: Path) -> tuple[int, int, int]:
    """Characters, the longest piece, and the memory of a new process above its imports, bytes."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, check=True)
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize("megabytes", [40, pytest.param(300, marks=pytest.mark.nightly)])
def test_memory_of_one_document(tmp_path: Path, megabytes: int) -> None:
    path, block = tmp_path / "a.txt", b"words and words\n" * (1 << 16)
    with open(path, "wb") as file:
        for _ in range(megabytes):
            file.write(block)
    chars, longest, peak = measured(path)
    assert (chars, longest <= 2 * PIECE_CHARS) == (megabytes << 20, True)
    assert peak < 20 << 20


@pytest.mark.parametrize("rows", [1 << 20, 500], ids=["one-row-group", "many-row-groups"])
def test_memory_of_a_parquet_file(tmp_path: Path, rows: int) -> None:
    """48 MB, also as a single row group: pages of some 1 MB are read one after the other."""
    texts = [f"{n} " * 4000 for n in range(2600)]
    table = pa.table({"text": texts})
    # the writer ends a page only after a batch
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=rows, use_dictionary=False, write_batch_size=16)
    chars, _, peak = measured(tmp_path / "a.parquet")
    assert chars == sum(map(len, texts)) > 40 << 20
    assert peak < 40 << 20
