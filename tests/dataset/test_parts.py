"""Parts of inputs: together, the parts of any size give the documents of the whole, in order."""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.corpora import WHOLE, as_csv, as_lines, as_parquet, as_tar, documents, parts_of, read
from support.gcs_server import CUT, HALF, GcsServer

from mesh_transformer.dataset.inputs import read_inputs
from mesh_transformer.dataset.parts import Bad, FilePart, pieces, plan
from mesh_transformer.errors import UserError

PART_BYTES = st.sampled_from([1, 2, 3, 5, 8, 13, 40, WHOLE])
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), max_size=12)
LINES = st.one_of(
    TEXTS.map(lambda text: json.dumps({"text": text}, ensure_ascii=False)),
    TEXTS.map(lambda text: json.dumps(text)),
    st.sampled_from(['{"text": null}', '{"text": ["a", "b"]}', "", "  ", "{", '{"body": "x"}', '{"text": 3}', "é€😀"]),
)


def oracle(content: bytes) -> list[str | None | int]:
    """By json.loads of whole lines: texts, None for null, and the byte at which a bad line begins."""
    found: list[str | None | int] = []
    at = 0
    for line in content.split(b"\n"):
        text = line.decode("utf-8-sig" if at == 0 else "utf-8")
        if text.strip():
            try:
                value = json.loads(text)
                value = value if isinstance(value, str) else value["text"]
                found.append("\n\n".join(value) if isinstance(value, list) else value)
                if not isinstance(found[-1], str | None):
                    found[-1] = at
            except (ValueError, KeyError, TypeError):
                found.append(at)
        at += len(line) + 1
    return found


@settings(max_examples=80)
@given(
    lines=st.lists(st.tuples(LINES, st.sampled_from(["\n", "\r\n"])), max_size=8),
    last=LINES,
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    part_bytes=PART_BYTES,
)
@example(lines=[("", "\r\n")], last='"x"', mark=b"\xef\xbb\xbf", part_bytes=2)
def test_ranges_of_lines_give_the_documents_of_whole_lines(
    lines: list[tuple[str, str]], last: str, mark: bytes, part_bytes: int
) -> None:
    content = mark + ("".join(line + end for line, end in lines) + last).encode()
    if not content:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.jsonl")
        path.write_bytes(content)
        parts = parts_of(path, part_bytes=part_bytes)
        assert [(part.first, part.stop) for part in parts] == [
            (at, min(at + part_bytes, len(content))) for at in range(0, len(content), part_bytes)
        ]
        got = documents(parts)
    places = [f"{path}, line at byte {one:,}" if type(one) is int else one for one in oracle(content)]
    assert [one.place if isinstance(one, Bad) else one for one in got] == places


@settings(max_examples=25)
@given(
    texts=st.lists(st.none() | st.text(max_size=30), min_size=1, max_size=20),
    rows=st.integers(1, 6),
    part_bytes=st.sampled_from([1, 150, 400, WHOLE]),
)
def test_row_groups_give_what_pyarrow_reads_whole(texts: list[str | None], rows: int, part_bytes: int) -> None:
    texts = [None if text is None else text.encode("utf-8", "replace").decode() for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.parquet")
        path.write_bytes(as_parquet(texts, rows))
        parts = parts_of(path, part_bytes=part_bytes)
        whole = pyarrow.parquet.read_table(path)
        groups = pyarrow.parquet.ParquetFile(path).num_row_groups
        assert documents(parts) == whole["text"].to_pylist()
    # each row group in one part, in order
    assert [n for part in parts for n in range(part.first, part.stop)] == list(range(groups))
    assert len(parts) == {1: groups, WHOLE: 1}.get(part_bytes, len(parts))


def corpus(folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(as_lines([f"line {n} é" for n in range(40)]))
    (folder / "b.txt").write_text("a text of\nits own")
    (folder / "c.parquet").write_bytes(as_parquet([f"row {n}" for n in range(30)], 7))
    (folder / "d.csv").write_bytes(as_csv(["x", 'y, "z"\nand more']))
    (folder / "e.tar").write_bytes(as_tar({"1.txt": b"one", "sub/2.jsonl": as_lines(["two", "three"])}))


CORPUS = [
    *(f"line {n} é" for n in range(40)),
    "a text of\nits own",
    *(f"row {n}" for n in range(30)),
    *("x", 'y, "z"\nand more'),
    *("one", "two", "three"),
]


def test_a_plan_follows_the_input_alone(tmp_path: Path) -> None:
    corpus(tmp_path)
    inputs = read_inputs([str(tmp_path)])
    parts = plan(inputs, 300, "text")
    assert parts == plan(read_inputs([str(tmp_path)]), 300, "text")
    assert [FilePart(**json.loads(json.dumps(asdict(part)))) for part in parts] == parts
    for part in parts:
        bounds = f"{part.first:,} to {part.stop - 1:,}"
        cut = {".jsonl": f", bytes {bounds}", ".parquet": f", row groups {bounds}"}
        assert part.place == part.file + cut.get(Path(part.file).suffix, "")
    sizes = {file.path: file.size for file in inputs[0].files}
    of = {name: [part for part in parts if part.file == str(tmp_path / name)] for name in ("a.jsonl", "b.txt", "d.csv")}
    assert len(of["a.jsonl"]) == -(-sizes[str(tmp_path / "a.jsonl")] // 300)
    # a file that is one part
    for name in ("b.txt", "d.csv"):
        assert [(part.first, part.stop) for part in of[name]] == [(0, sizes[str(tmp_path / name)])]
    assert documents(parts) == CORPUS


def test_inputs_keep_their_order_and_numbers(tmp_path: Path) -> None:
    for name in ("z.txt", "a.txt"):
        (tmp_path / name).write_text(name)
    parts = parts_of(tmp_path / "z.txt", tmp_path / "a.txt")
    assert [(part.input, Path(part.file).name) for part in parts] == [(0, "z.txt"), (1, "a.txt")]
    assert documents(parts) == ["z.txt", "a.txt"]


def test_a_bucket_gives_the_local_documents_in_few_requests(
    tmp_path: Path, gcs: GcsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mesh_transformer.files.RETRY_FIRST_S", 0.01)
    # a read of a file, which is a request only outside the range that was downloaded
    monkeypatch.setattr("mesh_transformer.data.corpus.storage._BUFFER_BYTES", 40)
    corpus(tmp_path)
    for path in tmp_path.iterdir():
        gcs.put("bucket", f"data/{path.name}", path.read_bytes())
    parts = parts_of("gs://bucket/data", part_bytes=300)
    assert [(part.first, part.stop) for part in parts] == [
        (part.first, part.stop) for part in parts_of(tmp_path, part_bytes=300)
    ]
    found = []
    for part in parts:
        gcs.requests.clear()
        found += documents([part])
        assert len(gcs.requests) <= 4, gcs.requests
    assert found == CORPUS
    # a connection that breaks, half an answer, and a server that is busy, at each request in turn
    for fault, path in ((CUT, "alt=media"), (HALF, "alt=media"), (503, "alt=media"), (503, "a.*")):
        for part in parts[:: len(parts) // 4]:
            whole = documents([part])
            gcs.fail(fault, method="GET", path=path, times=2)
            assert documents([part]) == whole
            assert not gcs.faults.pop().times


def test_a_line_over_the_end_of_a_range_in_a_bucket(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than what is downloaded after the range."""
    monkeypatch.setattr("mesh_transformer.data.corpus.formats.lines._AFTER_BYTES", 10)
    texts = ["short", "long " * 1000, "é" * 50, "end"]
    gcs.put("bucket", "a.jsonl", as_lines(texts))
    assert read("gs://bucket/a.jsonl", part_bytes=40) == texts


def test_a_part_of_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(as_lines(["x"]))
    parts = parts_of(tmp_path)
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(UserError, match=r"no such file: .*a\.jsonl"):
        list(pieces(parts[0], "text"))


def test_a_plan_without_text(tmp_path: Path) -> None:
    for name in ("a.txt", "b.jsonl", "c.csv", "d.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match="all files of the input are empty"):
        parts_of(tmp_path)
    with pytest.raises(UserError, match="a part of 0 bytes: must be 1 or more"):
        plan(read_inputs([str(tmp_path)]), 0)
