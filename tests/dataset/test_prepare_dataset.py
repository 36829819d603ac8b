"""A data set in a folder: its records, what is dropped, and that its bytes depend on the input and the options only."""

import functools
import hashlib
import json
import math
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.commands import run, write_run
from support.data_sets import (
    EOT,
    SEQ,
    SIZES,
    Corpus,
    Counting,
    Interrupted,
    documents_of,
    hashes,
    made,
    tokens_of,
    write_corpus,
)

import prepare_dataset
from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.dataset import job
from mesh_transformer.dataset.dropping import Duplicates
from mesh_transformer.dataset.objects import spool
from mesh_transformer.dataset.options import PrepareOptions
from mesh_transformer.dataset.tasks import InProcess
from mesh_transformer.errors import RunError, UserError

VAL = 0.1


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def whole(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data set of the corpus without duplicates, made in one process. Read only."""
    folder = tmp_path_factory.mktemp("whole") / "set"
    made(corpus.folder, folder, dedup=True, val=VAL)
    return folder


def manifest_of(folder: Path):
    return json.loads((folder / "manifest.json").read_text())


def is_held(text: str) -> bool:
    """Whether the validation set has a document, by the documented rule."""
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(hashlib.blake2b(digest, key=b"val", digest_size=8).digest(), "big") < VAL * 2**64


def tokens_for(documents):
    return [token for text in documents for token in [*text.encode(), EOT]]


def test_the_tokens_of_all_documents_in_order(corpus, whole):
    """A dict drops the duplicates."""
    unique, content = list(dict.fromkeys(corpus.documents)), manifest_of(whole)
    held = [text for text in unique if is_held(text)]
    assert 0.03 < len(held) / len(unique) < 0.2
    for side, documents in (("train", [text for text in unique if text not in held]), ("val", held)):
        tokens = tokens_for(documents)
        full = len(tokens) // (SEQ + 1) * (SEQ + 1)
        assert tokens_of(whole, side).tolist() == tokens[:full]
        assert content[side]["records"] * (SEQ + 1) == full
        assert content[side]["tokens"] == len(tokens)
        assert content[side]["tokens_in_no_record"] == len(tokens) - full


def test_the_manifest_counts_what_is_there_and_what_was_dropped(corpus, whole):
    content = manifest_of(whole)
    unique = set(corpus.documents)
    sides = content["train"], content["val"]
    assert sum(side["documents"] for side in sides) == len(unique)
    assert sum(side["bytes"] for side in sides) == sum(len(text.encode()) for text in unique)
    repeated = len(corpus.documents) - len(unique)
    assert content["dropped"] == {"duplicate": repeated, "empty": 2, "null": 1}
    assert content["options"]["input"] == [str(corpus.folder)]
    for side in sides:
        assert sum(side["lengths"].values()) == side["documents"]


def test_shards_are_even_and_have_their_hash_and_offsets(whole):
    content = manifest_of(whole)
    train = [shard["records"] for name, shard in content["shards"].items() if name.startswith("train")]
    assert len(train) > 2
    assert max(train) - min(train) <= 1
    assert max(train) * (SEQ + 1) <= SIZES["shard_tokens"]
    for name, shard in content["shards"].items():
        data = (whole / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["bytes"], shard["sha256"])
        offsets = np.fromfile(whole / f"{name}.offsets", "<u8").tolist()
        assert len(offsets) == shard["records"]
        with RecordReader(str(whole / name)) as reader:
            assert [record.offset for record in iter(reader.read, None)] == offsets
    assert not (whole / "work").exists()


def test_few_rows_in_memory_give_the_same_bytes(corpus, whole, tmp_path, monkeypatch):
    """Many groups and buckets of duplicates, slices of fragments."""
    monkeypatch.setattr(job, "Duplicates", functools.partial(Duplicates, rows=7))
    runner = Counting()
    made(corpus.folder, tmp_path / "set", runner, dedup=True, val=VAL)
    assert sum(name.startswith("bucket") for name in runner.names) > 20
    assert hashes(tmp_path / "set") == hashes(whole)


def test_duplicates_stay_without_dedup(corpus, tmp_path):
    made(corpus.folder, tmp_path / "set", val=0.0)
    expected = tokens_for(corpus.documents)
    assert tokens_of(tmp_path / "set", "train").tolist() == expected[: len(expected) // (SEQ + 1) * (SEQ + 1)]
    assert not (tmp_path / "set/val.index").exists()


def test_a_long_document_is_one_document_whatever_its_pieces(tmp_path):
    """A .txt file comes in other pieces than the same text in a line."""
    text = "".join(f"line {number} of a long text\n" for number in range(15_000))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "texts/b.txt").write_text(text)
    content = made(tmp_path / "texts", tmp_path / "set", dedup=True, val=0.0, seq=1000, shard_tokens=1 << 20)
    assert content["dropped"] == {"duplicate": 1}
    expected = tokens_for([text])
    assert tokens_of(tmp_path / "set", "train").tolist() == expected[: len(expected) // 1001 * 1001]


PEAK = """
import os, resource, sys
from mesh_transformer.dataset.fragment import Text, tokenizer_of, write_fragment
from mesh_transformer.dataset.parts import FilePart
from mesh_transformer.dataset.packed_shards import RowPacking, write_packed_shard
from mesh_transformer.dataset.shards import Taken, source_of, write_shard

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

file, folder = sys.argv[1:]
text = Text("bytes", "bytes")
tokenizer_of(text)
before, size = peak(), os.path.getsize(file)
found = write_fragment(f"{folder}/fragment", folder, FilePart(0, file, "text", 0, size, size), 1.0, text)
source = source_of(f"{folder}/fragment", found, 0)
write_shard(f"{folder}/train", folder, f"{folder}/result", [Taken(source, 0, source.tokens // 4096 * 4096)], 4096, 2)
whole = [Taken(source, 0, source.tokens)]
write_packed_shard(f"{folder}/packed", folder, f"{folder}/result", whole, RowPacking(4096, 0), 2)
print(found.train.tokens, peak() - before)
"""


def test_the_memory_of_a_task_does_not_grow_with_the_document(tmp_path):
    """Megabytes above the imports. With the tokens in memory, this document would take 48 MB more."""
    with (tmp_path / "a.txt").open("w") as file:
        for number in range(24):
            file.write(f"some words and more words {number:06}\n" * (10**6 // 33))
    child = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "a.txt"), str(tmp_path)], capture_output=True, text=True, check=True
    )
    tokens, megabytes = map(int, child.stdout.split())
    assert tokens > 23_000_000
    assert megabytes < 40


def test_shares_are_of_the_documents_and_grow(tmp_path):
    """The share of each input, by hash: a larger share has the documents of a smaller one."""
    count, sets = 4000, []
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(count)))
    for share in (0.1, 0.3, 0.31):
        spec, folder = f"{tmp_path}/a.jsonl={share}", tmp_path / str(share)
        content = made(spec, folder, val=0.0, seq=1)
        # the last token may be in no record
        sets.append(Counter(text for text in documents_of([*tokens_of(folder, "train"), EOT]) if text))
        assert content["dropped"] == {"not in the share": count - content["train"]["documents"]}
        sigma = math.sqrt(count * share * (1 - share))
        assert abs(sets[-1].total() - count * share) < 4 * sigma
    assert sets[0] < sets[1] < sets[2]


@pytest.mark.parametrize("last", ["fragment-000002", "sorted-00000", "bucket-00000", "kept-00000", "train-00001"])
def test_an_interrupted_job_goes_on_and_does_nothing_twice(corpus, whole, tmp_path, last):
    first, second = Counting(last), Counting()
    folder = tmp_path / "set"
    with pytest.raises(Interrupted):
        made(corpus.folder, folder, first, dedup=True, val=VAL)
    assert not (folder / "manifest.json").exists()
    assert not (folder / "train.index").exists()
    made(corpus.folder, folder, second, dedup=True, val=VAL)
    assert not set(first.names) & set(second.names)
    assert len(first.names) + len(second.names) > 20
    assert hashes(folder) == hashes(whole)


def test_a_whole_job_is_not_done_again_and_other_options_are_refused(corpus, tmp_path):
    folder = tmp_path / "set"
    with pytest.raises(Interrupted):
        made(corpus.folder, folder, Counting("fragment-000003"))
    for _ in range(2):
        with pytest.raises(UserError, match=rf"--seq was {SEQ} and is 16; --dedup was False and is True"):
            made(corpus.folder, folder, seq=16, dedup=True)
        content = made(corpus.folder, folder)
    before, runner = hashes(folder), Counting()
    assert made(corpus.folder, folder, runner) == content
    assert (runner.names, hashes(folder)) == ([], before)
    longer = corpus.folder / "b0.txt"
    text = longer.read_bytes()
    longer.write_bytes(text + b"more")
    try:
        with pytest.raises(UserError, match="names or sizes of the input files differ"):
            made(corpus.folder, folder)
    finally:
        longer.write_bytes(text)


def test_a_folder_with_other_files_is_refused(corpus, tmp_path):
    (tmp_path / "train-00000.tfrecords").write_bytes(b"of another program")
    with pytest.raises(UserError, match=r"has other files \(train-00000.tfrecords\)"):
        made(corpus.folder, tmp_path)


def test_bad_places_are_counted_or_end_the_job(tmp_path):
    lines = ["x" * 100, "not JSON", "y" * 100, "nor this"]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps({'text': t}) if len(t) > 9 else t}\n" for t in lines))
    source, folder = tmp_path / "a.jsonl", tmp_path / "set"
    with pytest.raises(UserError, match=r"a.jsonl, line at byte 113"):
        made(source, folder, val=0.0)
    content = made(source, folder, on_error="skip", val=0.0)
    assert sum(content["dropped"].values()) == 2
    assert [Path(message.partition(",")[0]).name for message in content["bad"]] == ["a.jsonl"] * 2
    assert content["train"]["documents"] == 2


def test_too_few_tokens_for_one_record(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match="6 tokens of training documents do not fill one record of 33"):
        made(tmp_path / "a.txt", tmp_path / "set", val=0.0)
    made(tmp_path / "a.txt", tmp_path / "set", val=0.0, seq=2)


def test_a_full_disk_leaves_nothing_half_written(corpus, whole, tmp_path):
    """A limit on the size of files has the same effect. The job goes on when there is space."""
    folder = tmp_path / "set"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"the disk is full.*give the same command again"):
            made(corpus.folder, folder, dedup=True, val=VAL)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (folder / "work").iterdir()] == ["job.json"]
    made(corpus.folder, folder, dedup=True, val=VAL)
    assert hashes(folder) == hashes(whole)


def test_tokens_are_those_of_transformers(texts, tmp_path):
    """GPT-2's tokenizer. A name of a special token in a text is plain characters."""
    import transformers

    documents = ["Some text, \n\n and 日本語 \U0001f600 more.", "an <|endoftext|> inside", " x " * 200, "é" * 50]
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    options = PrepareOptions(**{**SIZES, "seq": 1, "val": 0.0})
    job.prepare([str(source)], str(texts / "gpt2_tokenizer"), str(tmp_path / "set"), options, InProcess())
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(str(texts / "gpt2_tokenizer"))
    ids = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in documents]
    expected = [token for one in ids for token in [*one, 50256]]
    assert tokens_of(tmp_path / "set", "train").tolist() == expected[: len(expected) // 2 * 2]


def test_training_reads_the_data_set(whole, tmp_path):
    """The index files name the record files relative to their folder."""
    data = {"train_set": str(whole / "train.index"), "val_set": {"held": str(whole / "val.index")}, "batch_size": 4}
    write_run(tmp_path, data=data, optimizer={"total_steps": 2})
    run("device_train.py", "--config", "config.json", cwd=tmp_path)


def test_two_ray_workers_give_the_same_bytes(corpus, whole, tmp_path):
    pytest.importorskip("ray")
    sizes = ["--seq", str(SEQ), "--part-mb", "0.01", "--shard-tokens", "20000"]
    options = ["--tokenizer", "bytes", "--val", str(VAL), "--dedup", *sizes]
    command = ["--input", str(corpus.folder), "--output", "set", *options]
    run("prepare_dataset.py", *command, "--workers", "2", cwd=tmp_path, RAY_USAGE_STATS_ENABLED="0")
    assert hashes(tmp_path / "set") == hashes(whole)


def test_the_command_says_what_it_has_made(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--tokenizer", "bytes", "--seq", "32", "--workers", "1"]
    prepare_dataset.main(["--input", str(corpus.folder), "--output", "set", *options])
    said = capsys.readouterr().out
    assert said.startswith("set: ")
    assert said.endswith("; dropped: 2 empty, 1 null; data.train_set=set/train.index\n")


def test_a_cluster_that_does_not_answer(corpus, tmp_path):
    pytest.importorskip("ray")
    options = ["--tokenizer", "bytes", "--ray-address", "127.0.0.1:1"]
    with pytest.raises(UserError, match="no Ray cluster answers at 127.0.0.1:1"):
        prepare_dataset.main(["--input", str(corpus.folder), "--output", str(tmp_path / "set"), *options])


def test_a_node_that_does_not_see_the_output_folder(tmp_path):
    with pytest.raises(UserError, match=r"has no folder .*none: give an --output that all nodes share"):
        spool(str(tmp_path / "none"))
