"""A data set with --pack documents: each target of each document once, and the same bytes in any order of the tasks."""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example as with_example
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import run
from support.data_sets import EOT, SEQ, Corpus, Counting, Interrupted, hashes, made, write_corpus

from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.dataset import job, packed_shards
from mesh_transformer.dataset.counts import ROW, DocumentCounts
from mesh_transformer.dataset.dropping import Duplicates
from mesh_transformer.dataset.duplicates import RUN, Range
from mesh_transformer.dataset.fragment import Fragment
from mesh_transformer.dataset.objects import write_object
from mesh_transformer.dataset.options import PrepareOptions, Work
from mesh_transformer.dataset.packed_shards import RowPacking, packed_cuts, write_packed_shard
from mesh_transformer.dataset.shards import RECORDS, Source, source_of, taken
from mesh_transformer.dataset.tasks import InProcess
from mesh_transformer.dataset.worker import Task
from mesh_transformer.errors import UserError
from mesh_transformer.sequences import Example, document_numbers

OPTIONS: dict[str, Any] = {"dedup": True, "val": 0.1, "pack": "documents"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", seed=3)


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed data set of the corpus, made in one process. Read only."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    made(corpus.folder, folder, **OPTIONS)
    return folder


def examples_of(path: Path) -> list[Example]:
    with RecordReader(str(path)) as reader:
        return [record.example() for record in iter(reader.read, None)]


def examples_of_side(folder: Path, side: str) -> list[Example]:
    names = (folder / f"{side}.index").read_text().split()
    return [example for name in names for example in examples_of(folder / name)]


def targets_of(examples: Sequence[Example]) -> Counter[tuple[int, int]]:
    """Each target with the token before it."""
    found: Counter[tuple[int, int]] = Counter()
    for example in examples:
        numbers, tokens = document_numbers(example), example.tokens.tolist()
        counted = (numbers[1:] == numbers[:-1]) & (numbers[1:] > 0)
        found.update(pair for pair, counts in zip(itertools.pairwise(tokens), counted, strict=True) if counts)
    return found


@pytest.mark.parametrize("dedup", [True, False])
def test_each_target_of_each_document_once(corpus, whole, tmp_path, dedup):
    folder = whole
    if not dedup:
        folder = tmp_path / "set"
        made(corpus.folder, folder, **{**OPTIONS, "dedup": False})
    documents = [[*text.encode(), EOT] for text in (dict.fromkeys(corpus.documents) if dedup else corpus.documents)]
    expected = Counter(pair for tokens in documents for pair in itertools.pairwise(tokens))
    train, val = (examples_of_side(folder, side) for side in ("train", "val"))
    assert len(val) > 20
    assert targets_of(train + val) == expected
    assert all(len(example.tokens) == SEQ + 1 for example in train + val)


def test_a_document_that_fits_a_row_is_whole(corpus, tmp_path):
    """With rows of 600 tokens, no row is filled with a part of such a document."""
    content = made(corpus.folder, tmp_path / "set", **{**OPTIONS, "val": 0.0, "seq": 600, "shard_tokens": 1 << 20})
    assert content["train"]["waste"] < 0.05
    found = Counter(
        tuple(piece)
        for example in examples_of_side(tmp_path / "set", "train")
        for piece in np.split(example.tokens, np.cumsum(example.documents))[:-1]
    )
    documents = [(*text.encode(), EOT) for text in dict.fromkeys(corpus.documents)]
    short = [tokens for tokens in documents if len(tokens) <= 601]
    assert len(short) > 300
    assert all(found[tokens] == 1 for tokens in short)


def test_the_manifest_counts_padding_and_cuts(whole):
    content = json.loads((whole / "manifest.json").read_text())
    for side in ("train", "val"):
        found, examples = content[side], examples_of_side(whole, side)
        padding = [int((document_numbers(example) == 0).sum()) for example in examples]
        assert found["records"] == len(examples)
        assert found["padding"] == sum(padding)
        assert found["waste"] == pytest.approx(sum(padding) / (SEQ + 1) / len(examples), abs=1e-6)
        # a document in n pieces has n - 1 cuts
        assert found["cuts"] == sum(len(example.documents) for example in examples) - found["documents"]
        for example, room in zip(examples, padding, strict=True):
            assert example.tokens[SEQ + 1 - room :].tolist() == [EOT] * room


def test_records_are_not_in_the_order_of_their_lengths(whole):
    """Best fit has the long pieces first."""
    pieces = [len(example.documents) for example in examples_of(whole / "train-00000.tfrecords")]
    assert len(set(pieces)) > 2
    assert abs(np.corrcoef(pieces, np.arange(len(pieces)))[0, 1]) < 0.3


class Backwards:
    """Runs the tasks of a stage in this process, the last one first."""

    def run(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Any]]:
        for place, result in InProcess().run(tasks[::-1]):
            yield len(tasks) - 1 - place, result


def test_the_bytes_do_not_depend_on_the_order_of_the_tasks(corpus, whole, tmp_path):
    made(corpus.folder, tmp_path / "set", Backwards(), **OPTIONS)
    assert hashes(tmp_path / "set") == hashes(whole)


def test_few_rows_in_memory_give_the_same_records(corpus, whole, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "Duplicates", functools.partial(Duplicates, rows=7))
    monkeypatch.setattr(packed_shards, "_TABLE_ROWS", 3)
    monkeypatch.setattr(packed_shards, "_PIECES", 2)
    made(corpus.folder, tmp_path / "set", **OPTIONS)
    assert hashes(tmp_path / "set") == hashes(whole)


def test_an_interrupted_job_goes_on(corpus, whole, tmp_path):
    first, second = Counting("train-00001"), Counting()
    with pytest.raises(Interrupted):
        made(corpus.folder, tmp_path / "set", first, **OPTIONS)
    made(corpus.folder, tmp_path / "set", second, **OPTIONS)
    assert not set(first.names) & set(second.names)
    assert hashes(tmp_path / "set") == hashes(whole)


@pytest.mark.nightly
def test_two_ray_workers_give_the_same_packed_bytes(corpus, whole, tmp_path):
    pytest.importorskip("ray")
    sizes = ["--seq", str(SEQ), "--part-mb", "0.01", "--shard-tokens", "20000"]
    options = ["--tokenizer", "bytes", "--val", "0.1", "--dedup", "--pack", "documents", *sizes]
    command = ["--input", str(corpus.folder), "--output", "set", *options]
    said, _ = run("prepare_dataset.py", *command, "--workers", "2", cwd=tmp_path, RAY_USAGE_STATS_ENABLED="0")
    assert "% padding" in said
    assert hashes(tmp_path / "set") == hashes(whole)


def test_another_packing_into_the_same_folder_is_refused(corpus, whole, tmp_path):
    with pytest.raises(UserError, match="--pack was documents and is concat"):
        made(corpus.folder, whole, **{**OPTIONS, "pack": "concat"})
    made(corpus.folder, tmp_path / "set", dedup=True, val=0.1)
    with pytest.raises(UserError, match="--pack was concat and is documents"):
        made(corpus.folder, tmp_path / "set", **OPTIONS)


def test_the_key_without_packing_is_that_of_earlier_versions():
    """A data set of an earlier version counts as finished, and an interrupted one goes on. An earlier version made this
    key."""
    key = "929469813833cb39e7e51e3999ff3c3cdab1d325dcfc23f2c31bf44e837b56a9"
    assert Work.of([], "bytes", "bytes", PrepareOptions(seq=32)).content["key"] == key
    assert Work.of([], "bytes", "bytes", PrepareOptions(seq=32, pack="documents")).content["key"] != key


def fragment_of(path: Path, lengths: Sequence[int], first: int, kept: Sequence[bool] | None = None) -> Source:
    """A fragment of training documents whose tokens are numbers from `first` on. Those not in `kept` are duplicates."""
    table = np.zeros(len(lengths), ROW)
    table["tokens"] = lengths
    tokens = np.arange(first, first + sum(lengths), dtype="<u4")
    counts = DocumentCounts.of(table)
    payload = [table.tobytes(), tokens.tobytes()]
    source = source_of(
        str(path), write_object(str(path), str(path.parent), Fragment(counts, DocumentCounts(), {}, (), 4), payload), 0
    )
    if kept is None:
        return source
    ends = np.cumsum(lengths)
    pairs = [(end - length, end) for length, end, keep in zip(lengths, ends, kept, strict=True) if keep]
    runs = np.array(pairs, RUN)
    path.with_suffix(".runs").write_bytes(runs.tobytes())
    remain = int((runs["stop"] - runs["first"]).sum())
    return source._replace(tokens=remain, runs=Range(f"{path.with_suffix('.runs')}", 0, runs.nbytes))


DOCUMENTS = st.lists(st.tuples(st.integers(2, 30), st.booleans()), min_size=1, max_size=25)


# a shard of 33 tokens or less would have no piece
@with_example(fragments=[[(49, True), (33, True), (18, True)]], duplicates=False, length=33, most=33)
@settings(max_examples=30)
@given(
    fragments=st.lists(DOCUMENTS, min_size=1, max_size=4),
    duplicates=st.booleans(),
    length=st.integers(2, 12),
    most=st.integers(2, 60),
)
def test_shards_have_each_target_once(tmp_path_factory, fragments, duplicates, length, most):
    """Documents of any length, of fragments and shards that end anywhere. Each token has a number of its own."""
    folder = tmp_path_factory.mktemp("shards")
    sources, expected, first = [], [], 0
    for number, documents in enumerate(fragments):
        lengths = [tokens for tokens, _ in documents]
        kept = [keep or not duplicates for _, keep in documents]
        begins = first + np.cumsum(lengths) - lengths
        if any(kept):
            sources.append(fragment_of(folder / f"fragment{number}", lengths, first, kept if duplicates else None))
        for begin, tokens, keep in zip(begins.tolist(), lengths, kept, strict=True):
            expected += [(token, token + 1) for token in range(begin, begin + tokens - 1) if keep]
        first += sum(lengths)
    bounds = packed_cuts(sum(source.tokens for source in sources), length, most)
    examples = []
    for number, places in enumerate(taken(sources, bounds)):
        path = str(folder / f"train-{number}")
        shard = write_packed_shard(path, str(folder), f"{path}.result", places, RowPacking(length, 999_999), 4)
        assert shard.records > 0
        found = examples_of(Path(path + RECORDS))
        assert shard.padding == sum((document_numbers(example) == 0).sum() for example in found)
        examples += found
    assert all(len(example.tokens) == length for example in examples)
    assert sorted(targets_of(examples).elements()) == expected
