"""From text to records: contents, order, bad input, and the size of the memory."""

import gzip
import io
import json
import logging
import lzma
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import zstandard
from support.loading import read_records

import create_finetune_tfrecords
from mesh_transformer import logs
from mesh_transformer.data.corpus import pieces as corpus
from mesh_transformer.data.corpus.options import SequenceOptions
from mesh_transformer.data.corpus.pieces import cut, input_files
from mesh_transformer.data.corpus.sequences import TokenStore, prepare, sequences
from mesh_transformer.data.tokens.cleaning import detokenize_wikitext, make_cleaner
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer, load_tokenizer
from mesh_transformer.errors import UserError

REPO = Path(__file__).resolve().parents[3]
BYTES = ByteTokenizer()
IN_ORDER = {"preserve_data_order": True}


def tokens_of(source, tmp_path, seq=7, **options):
    """The written sequences as one array, and what `prepare` reported."""
    written = prepare(
        input_files(str(source)), "out", str(tmp_path / "records"), BYTES, SequenceOptions(seq=seq, **options)
    )
    rows = np.stack(list(read_records(written.path)))
    assert rows.shape == (written.sequences, seq + 1)
    assert written.tokens == rows.size
    assert written.path.endswith(f"out_{written.sequences}.tfrecords")
    return rows, written


def text_of(rows):
    return "".join("|" if t == 256 else chr(t) for t in rows.reshape(-1))


def store_of(docs):
    store = TokenStore(None, 50257)
    for doc in docs:
        store.add(doc[:-1])
        store.end_document(doc[-1])
    return store


@pytest.mark.parametrize("name", ["arrays_to_sequences_golden.json", "arrays_to_sequences_golden2.json"])
def test_golden_sequences(golden, name):
    case = json.loads((golden / name).read_text())
    *full, tail = case["sequences"]
    with store_of(case["docs"]) as store:
        got = [s.tolist() for s in sequences(store, SequenceOptions(seq=case["sequence_length"] - 1, **IN_ORDER))]
        assert got == full
        twice = SequenceOptions(seq=case["sequence_length"] - 1, n_repack_epochs=2, **IN_ORDER)
        again = [t for s in list(sequences(store, twice))[len(full) :] for t in s.tolist()]
    assert again == (tail + [t for s in case["sequences"] for t in s])[: len(again)]
    assert len(again) == (len(tail) + len(tail) + 16 * len(full)) // 16 * 16


def test_documents_end_with_eot_and_split_at_it(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("one<|endoftext|>two<|endoftext|><|endoftext|>three.")
    rows, written = tokens_of(source, tmp_path, **IN_ORDER)
    assert text_of(rows) == "one|two|three.|"[: rows.size]
    assert (written.source.documents, written.source.tokens) == (3, 15)
    rows, written = tokens_of(source, tmp_path, treat_eot_as_text=True, **IN_ORDER)
    assert text_of(rows).startswith("one<|endoftext|>two")
    assert written.source.documents == 1


def test_shuffling_follows_the_seed_and_keeps_the_documents(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"{k:07d}"}) + "\n" for k in range(50)))
    orders = [tokens_of(source, tmp_path, seed=seed)[0].tolist() for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    plain = tokens_of(source, tmp_path, **IN_ORDER)[0].tolist()
    assert plain not in orders
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(plain)


def test_the_sequences_of_one_document_are_shuffled(tmp_path):
    """The order of the documents tells nothing here: only packed sequences can change places."""
    source = tmp_path / "a.txt"
    source.write_text("".join(f"{k:07d}." for k in range(60)))
    orders = [tokens_of(source, tmp_path, seed=seed)[0].tolist() for seed in (1, 1, 2)]
    plain = tokens_of(source, tmp_path, **IN_ORDER)[0].tolist()
    assert orders[0] == orders[1] != orders[2]
    assert plain not in orders
    assert sorted(orders[0]) == sorted(orders[2]) == sorted(plain)


def test_repacking_moves_the_boundaries(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("abcdefghij")
    rows, _ = tokens_of(source, tmp_path, n_repack_epochs=5, **IN_ORDER)
    assert text_of(rows) == ("abcdefghij|" * 5)[:48]


def test_sequences_with_few_tokens_are_dropped(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("a" * 16 + "abcdefgh" + "b" * 8)
    rows, _ = tokens_of(source, tmp_path, min_unique_tokens=5, **IN_ORDER)
    assert text_of(rows) == "abcdefgh"
    with pytest.raises(UserError, match="--min-unique-tokens"):
        tokens_of(source, tmp_path, min_unique_tokens=9)


def tarred(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


LINES = b'{"text": "alpha", "meta": {}}\n\n"beta"\n'
TAR = tarred({"x/1.txt": b"alpha", "x/skip.bin": b"\0", "x/2.jsonl": b'"beta"\n'})


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.txt", b"alpha<|endoftext|>beta"),
        ("a.jsonl", LINES),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        ("b.jsonl.zst", zstandard.compress(LINES[:20]) + zstandard.compress(LINES[20:])),
        ("a.jsonl.xz", lzma.compress(LINES)),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.txt.xz", lzma.compress(b"alpha<|endoftext|>beta")),
        ("a.xz", lzma.compress(b"alpha<|endoftext|>beta")),
        ("b.xz", lzma.compress(TAR)),
        ("a.tar.gz", gzip.compress(TAR)),
        ("a.tgz", gzip.compress(TAR)),
        ("a.tar", TAR),
        ("A.TXT", b"alpha<|endoftext|>beta"),
        ("a.Jsonl.GZ", gzip.compress(LINES)),
        ("a.TGZ", gzip.compress(TAR)),
        ("b.XZ", lzma.compress(TAR)),
        ("b.tar", tarred({"1.TXT": b"alpha", "2.JSONL": b'"beta"\n'})),
    ],
)
def test_kinds_of_input(tmp_path, name, data):
    (tmp_path / name).write_bytes(data)
    rows, _ = tokens_of(tmp_path / name, tmp_path, seq=10, **IN_ORDER)
    assert text_of(rows) == "alpha|beta|"


def test_lines_as_the_originals_reader_took_them(tmp_path, monkeypatch, capsys):
    """lm_dataformat joined the paragraphs of a list with an empty line."""
    lines = [{"text": ["one", "two"]}, {"text": None}, {"text": []}, {"text": "three"}, {"text": None}]
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows, written = tokens_of("a.jsonl", tmp_path, seq=14, **IN_ORDER)
    assert text_of(rows) == "one\n\ntwo|three|"
    assert (written.source.documents, written.null_lines) == (2, 2)
    create_finetune_tfrecords.main(["a.jsonl", "n", "--tokenizer", "bytes", "--seq", "14"])
    assert (
        capsys.readouterr().out
        == "./n_1.tfrecords: 1 sequence, 15 tokens; lines skipped because their text is null: 2\n"
    )


@pytest.mark.parametrize("archive", [False, True])
def test_files_of_other_kinds_are_named(tmp_path, caplog, archive):
    names = ["a.txt", *(f"{k}.pdf" for k in range(5)), "b.md", ".hidden"]
    if archive:
        (tmp_path / "in.tar").write_bytes(tarred(dict.fromkeys(sorted(names), b"some text")))
    else:
        (tmp_path / "in").mkdir()
        for name in names:
            (tmp_path / "in" / name).write_text("some text")
    source = tmp_path / ("in.tar" if archive else "in")
    with caplog.at_level(logging.WARNING):
        tokens_of(source, tmp_path, **IN_ORDER)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{source}: skipped 6 files (0.pdf, 1.pdf, 2.pdf, ...); allowed: .txt, .jsonl, .tar")


def test_a_folder_is_read_in_order(tmp_path):
    folder = tmp_path / "in"
    (folder / "b").mkdir(parents=True)
    for name, text in {
        "c.txt": "third",
        "b/1.txt": "second",
        "a.jsonl": '"first"\n',
        "x.png": "no",
        ".y.txt": "no",
    }.items():
        (folder / name).write_text(text)
    rows, _ = tokens_of(folder, tmp_path, seq=8, **IN_ORDER)
    assert text_of(rows) == "first|second|third|"[:18]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"tiny", "5 tokens do not fill one sequence of 8.*--seq"),
        ("a.txt", b"", "0 documents"),
        ("a.txt", b"fine\nbad \xff\xfe text", "a.txt, byte 9: not UTF-8"),
        ("a.pdf", b"%PDF", "a.pdf: unknown file suffix; allowed"),
        ("a.jsonl", b'"fine line"\n{"text": \n', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "x"}\n', "line 1: neither"),
        ("a.jsonl", b'{"text": ["x", 1]}\n', "line 1: neither"),
        ("a.jsonl", b'["x"]\n', "line 1: neither"),
        ("a.jsonl", b"[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", b'"\xff"\n', "line 1: not JSON"),
        ("a.jsonl.zst", zstandard.compress(LINES * 50)[:-7], "damaged zst"),
        ("a.jsonl.zst", LINES, "damaged zst"),
        ("a.jsonl.xz", lzma.compress(LINES)[:-9], "damaged xz"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-3], "damaged gzip"),
        ("a.tar.gz", gzip.compress(tarred({"1.txt": b"x" * 5000})[:700]), "damaged tar"),
        ("a.tar", b"x" * 2000, "damaged tar"),
    ],
)
def test_bad_input_leaves_nothing_behind(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        tokens_of(tmp_path / name, tmp_path)
    assert not (tmp_path / "records").exists() or not list((tmp_path / "records").iterdir())


def test_other_refusals(tmp_path):
    (tmp_path / "a.txt").write_text("long enough text")
    for source, name, options, message in (
        (tmp_path / "none", "x", {}, "no such file"),
        (tmp_path, "x/y", {}, "--output-dir"),
        (tmp_path / "a.txt", "x", {"seq": 0}, "--seq 0: must be 1 or more"),
        (tmp_path / "a.txt", "x", {"n_repack_epochs": 0}, "--n-repack-epochs 0: must be 1 or more"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(input_files(str(source)), name, str(tmp_path), BYTES, SequenceOptions(**options))
    with pytest.raises(UserError, match=r"a\.txt is a file: choose another folder"):
        prepare([str(tmp_path / "a.txt")], "x", str(tmp_path / "a.txt/out"), BYTES, SequenceOptions(seq=4))


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('"' + "x" * 200)
    with pytest.raises(UserError, match="line 1: longer than 100 bytes"):
        tokens_of(tmp_path / "a.jsonl", tmp_path)


def test_cutting_long_documents_changes_no_token(texts, monkeypatch):
    monkeypatch.setattr(corpus, "PIECE_CHARS", 300)
    tokenizer = load_tokenizer(str(texts / "gpt2_tokenizer"))
    text = (REPO / "data/tiny_shakespeare/train.txt").read_text()[:60_000]
    text += "".join(f"x{k}  y,\n\n \n\tz'll {k}...\n" for k in range(2000))
    pieces = list(cut([text[k : k + 100] for k in range(0, len(text), 100)], None))
    assert len(pieces) > 150
    assert "".join(piece.text for piece in pieces) == text
    ids = tokenizer.encode_literal([piece.text for piece in pieces])
    assert [i for piece in ids for i in piece] == tokenizer.encode(text)


def test_the_separator_is_found_across_blocks():
    text = "ab<|endoftext|>cd" * 30
    for size in (1, 5, 17):
        pieces = list(cut([text[k : k + size] for k in range(0, len(text), size)], "<|endoftext|>"))
        assert [p.text for p in pieces] == text.split("<|endoftext|>")


# one process for each file, forked after the imports: the peak of each is its own
PEAK = """
import os, re, sys
from mesh_transformer.data.corpus.options import SequenceOptions
from mesh_transformer.data.corpus.sequences import prepare
from mesh_transformer.data.tokens.tokenizer import ByteTokenizer
for name in sys.argv[1:]:
    if not os.fork():
        prepare([name], "m", ".", ByteTokenizer(), SequenceOptions(seq=2047))
        print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) << 10)
        break
    os.wait()
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of the memory is read from /proc")
@pytest.mark.parametrize("kind", ["jsonl", "txt"])
def test_memory_does_not_grow_with_the_text(tmp_path, kind):
    text = "some words and more of them. " * 300
    line = json.dumps({"text": text}) + "\n" if kind == "jsonl" else text
    names = [f"{megabytes}.{kind}" for megabytes in (3, 23)]
    for name, megabytes in zip(names, (3, 23), strict=True):
        (tmp_path / name).write_text(line * ((megabytes << 20) // len(line)))
    command = [sys.executable, "-c", PEAK, *names]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    first, second = map(int, done.stdout.split())
    assert len(list(tmp_path.glob("m_*.tfrecords"))) == 2
    assert second < first + (8 << 20)


@pytest.mark.parametrize(
    ("artifact", "clean"),
    [
        ("a well @-@ known 1 @,@ 000 and 3 @.@ 5", "a well-known 1,000 and 3.5"),
        (" = = Early life = = ", "== Early life =="),
        (" = Title = \n \n He was born .", "= Title =\n\nHe was born."),
        ('He said " yes , please " ( twice ) ; then left .', 'He said "yes, please" (twice); then left.'),
        ("the ship 's crew did n't", "the ship's crew didn't"),
        ("20 % of $ 5", "20% of $5"),
        ("nothing to do, really (at all).", "nothing to do, really (at all)."),
    ],
)
def test_wikitext(artifact, clean):
    assert detokenize_wikitext(artifact) == clean


def test_cleaners():
    assert make_cleaner(True, False)("schÃ¶n ﬁne") == "schön fine"
    assert make_cleaner(True, True)("ﬁne , 1 @.@ 5") == "fine, 1.5"
    assert make_cleaner(False, False)("ﬁne ,") == "ﬁne ,"


def test_command_line(tmp_path, texts):
    (tmp_path / "in.txt").write_text("hello\n\nhello " * 100)
    command = [sys.executable, str(REPO / "create_finetune_tfrecords.py"), "in.txt", "small", "--seq", "8"]
    folder = str(texts / "gpt2_tokenizer")
    done = subprocess.run([*command, "--tokenizer", folder], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.endswith(" I reading in.txt\n")
    assert len(done.stderr.splitlines()) == 1
    (path,) = tmp_path.glob("small_*.tfrecords")
    rows = np.stack(list(read_records(str(path))))
    assert path.name == f"small_{len(rows)}.tfrecords"
    assert f"{path.name}: {len(rows)} sequences, {rows.size:,} tokens" in done.stdout
    assert rows.shape[1] == 9

    done = subprocess.run(
        [*command, "--seq", "9999", "--tokenizer", "bytes"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[1].startswith(
        "error: in.txt: 1,301 tokens do not fill one sequence of 10,000 (1 document): add"
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", path.name]


def test_progress_counts_pieces_and_sequences(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logs, "_LINE_EVERY_S", 0.0)
    (tmp_path / "a.txt").write_text("abcdefg<|endoftext|>hijklmn")
    with caplog.at_level(logging.INFO):
        tokens_of(tmp_path / "a.txt", tmp_path, **IN_ORDER)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == ["pieces of text 1", "pieces of text 2"]
    assert [line.partition("  eta")[0] for line in lines[2:]] == ["sequences 1/2", "sequences 2/2"]


def test_every_option_reaches_the_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("ﬁne , or 1 @.@ 5 <|endoftext|> x")
    switches = ["normalize-with-ftfy", "normalize-with-wikitext-detokenize", "treat-eot-as-text", "verbose"]
    values = {
        "output-dir": "o",
        "seq": 3,
        "tokenizer": "bytes",
        "seed": 5,
        "n-repack-epochs": 2,
        "min-unique-tokens": 2,
    }
    arguments = ["in.txt", "n", *(f"--{s}" for s in switches), *(f"--{k}={v}" for k, v in values.items())]
    create_finetune_tfrecords.main([*arguments, "--preserve-data-order"])
    (path,) = (tmp_path / "o").iterdir()
    assert text_of(np.stack(list(read_records(str(path))))).startswith("fine, or 1.5 <|endoftext|> x|")
    assert str(path.name) in capsys.readouterr().out
    with pytest.raises(UserError, match="no such tokenizer folder"):
        create_finetune_tfrecords.main(["in.txt", "n", "--tokenizer", "./none"])
