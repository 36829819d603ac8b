"""Bits per byte: counts of a text at its preparation, and their place beside a validation set."""

import json
import math

import pytest

from mesh_transformer import files
from mesh_transformer.data.batches.loader import make_val_loader
from mesh_transformer.data.corpus.sequences import cached_records
from mesh_transformer.data.records.text_counts import TextCounts, counts_of_cached, counts_of_index
from mesh_transformer.errors import UserError

COUNTS = {"documents": 3, "tokens": 30, "bytes": 90}
TEXT = "To be, or not to be. na\u00efve \u4f60\n" * 40


def test_the_bytes_of_one_document_are_its_tokens_of_bytes(tmp_path, monkeypatch):
    """With the byte tokenizer a token is a byte, so bits per byte are nats / ln 2. One more token ends the text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text(TEXT)
    val = make_val_loader(str(tmp_path / "a.txt"), seq=16, batch=2, rows=range(2), tokenizer="bytes")
    n = len(TEXT.encode())
    assert val.counts == TextCounts(1, n + 1, n)
    assert val.counts.bits_per_byte(1.5) == pytest.approx(1.5 / math.log(2) * (n + 1) / n, rel=1e-12)


def test_separators_are_tokens_and_no_bytes(tmp_path, monkeypatch, texts):
    """The tokens are counted by transformers, the bytes by Python."""
    from transformers import GPT2TokenizerFast

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = str(texts / "gpt2_tokenizer")
    (tmp_path / "a.txt").write_text(f"{TEXT}<|endoftext|>{TEXT}<|endoftext|><|endoftext|>")
    records = cached_records(str(tmp_path / "a.txt"), 16, folder)
    tokens = len(GPT2TokenizerFast.from_pretrained(folder).encode(TEXT))
    assert counts_of_cached(records) == TextCounts(2, 2 * (tokens + 1), 2 * len(TEXT.encode()))


def test_the_manifest_beside_an_index(dataset):
    folder = dataset.parent
    val, train = folder / "val.index", folder / "train.index"
    for path in (val, train):
        path.write_bytes(dataset.read_bytes())

    def counts(path):
        return make_val_loader(str(path), seq=4, batch=1, rows=range(1)).counts

    assert counts(val) is None
    (folder / "manifest.json").write_text(json.dumps({"train": {**COUNTS, "bytes": 60}, "val": {**COUNTS, "x": 1}}))
    assert counts(val) == TextCounts(3, 30, 90)
    assert counts(train) == TextCounts(3, 30, 60)
    # of no index of the manifest, and one of its record files
    assert counts(dataset) is counts(folder / "a.tfrecords") is None


@pytest.mark.parametrize(
    "manifest",
    [[], {}, {"val": 1}, {"val": {**COUNTS, "bytes": 0}}, {"val": {**COUNTS, "bytes": 9.5}}, {"val": {"tokens": 1}}],
)
def test_the_manifest_of_another_program_has_no_counts(tmp_path, manifest):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert counts_of_index(str(tmp_path / "val.index")) is None


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[" * 100_000])
def test_a_damaged_manifest_is_named(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(UserError, match=r"manifest\.json cannot be read .*: copy it again"):
        counts_of_index(str(tmp_path / "val.index"))


def test_a_manifest_on_gcs(gcs):
    files.replace("gs://texts/o/manifest.json", json.dumps({"val": COUNTS}).encode())
    assert counts_of_index("gs://texts/o/val.index") == TextCounts(3, 30, 90)
    assert counts_of_index("gs://texts/p/val.index") is None
