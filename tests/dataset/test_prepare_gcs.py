"""A data set on gs://: the same bytes as on a disk, few requests, and every request may fail."""

import itertools

import pytest
from support.data_sets import Counting, hashes, made, write_corpus
from support.gcs_server import HALF

from mesh_transformer import files
from mesh_transformer.errors import RunError

OPTIONS = {"dedup": True, "val": 0.1}
OUTPUT = "gs://bucket/set"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts", seed=1)


@pytest.fixture(scope="module")
def local(corpus, tmp_path_factory):
    """The hashes of the same data set on a disk."""
    folder = tmp_path_factory.mktemp("local") / "set"
    made(corpus.folder, folder, **OPTIONS)
    return hashes(folder)


def remote(gcs, tmp_path):
    """The hashes of the data set in the bucket."""
    for name, data in gcs.objects("bucket").items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return hashes(tmp_path / "set")


def test_the_same_bytes_with_four_reads_a_part_and_shard(gcs, corpus, local, tmp_path):
    runner = Counting()
    content = made(corpus.folder, OUTPUT, runner, **OPTIONS)
    assert remote(gcs, tmp_path) == local
    reads = [request for request in gcs.requests if request.startswith("GET")]
    assert len(reads) <= 4 * (parts_of(runner) + len(content["shards"])), "\n".join(reads)


def test_packed_records_are_the_same_bytes_too(gcs, corpus, tmp_path):
    made(corpus.folder, tmp_path / "local/set", pack="documents", **OPTIONS)
    made(corpus.folder, OUTPUT, pack="documents", **OPTIONS)
    assert remote(gcs, tmp_path) == hashes(tmp_path / "local/set")


def parts_of(runner):
    return sum(name.startswith("fragment") for name in runner.names)


def test_a_part_of_a_bucket_is_read_with_one_request(gcs, corpus, tmp_path):
    """The footer of a Parquet file is read twice: when the parts are made, and by its part."""
    for file in corpus.folder.iterdir():
        gcs.put("bucket", f"in/{file.name}", file.read_bytes())
    runner = Counting()
    made("gs://bucket/in", tmp_path / "set", runner, **OPTIONS, part_mb=1.0)
    # the first use of the client in a process also reads the bucket's own description
    reads = [request for request in gcs.requests if request.startswith("GET") and "/bucket/o" in request]
    assert parts_of(runner) == len(list(corpus.folder.iterdir())) == 5
    # and one request lists the objects
    assert len(reads) == 1 + 5 + 2, "\n".join(reads)


@pytest.mark.parametrize(("status", "methods"), [(503, ("GET", "POST", "PUT", "DELETE")), (HALF, ("GET",))])
def test_each_call_fails_once(gcs, corpus, local, tmp_path, monkeypatch, status, methods):
    """The client repeats a call. Calls come one after the other, so every second one is a repeated one."""
    monkeypatch.setattr(files, "RETRY_FIRST_S", 0.001)
    numbers, note = itertools.count(), gcs.next_fault

    def fault(method, path):
        note(method, path)
        return status if method in methods and next(numbers) % 2 == 0 else None

    monkeypatch.setattr(gcs, "next_fault", fault)
    made(corpus.folder, OUTPUT, **OPTIONS)
    assert next(numbers) > 100
    assert remote(gcs, tmp_path) == local


@pytest.mark.parametrize("number", [1, 5, 17, 25, 45])
def test_a_bucket_that_refuses_leaves_nothing_half_written(gcs, corpus, local, tmp_path, monkeypatch, number):
    """Upload `number` is refused. The job ends with one line, and goes on when the bucket takes the object."""
    uploads, note = itertools.count(1), gcs.next_fault

    def fault(method, path):
        note(method, path)
        return 403 if method == "POST" and next(uploads) == number else None

    monkeypatch.setattr(gcs, "next_fault", fault)
    with pytest.raises(RunError, match=r"403.*give the same command again"):
        made(corpus.folder, OUTPUT, **OPTIONS)
    assert "set/manifest.json" not in gcs.objects("bucket")
    made(corpus.folder, OUTPUT, **OPTIONS)
    assert remote(gcs, tmp_path) == local
