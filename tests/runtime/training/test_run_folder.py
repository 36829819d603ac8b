"""The local folder of a run in a bucket: the bucket is authoritative, and only newer local metrics are kept."""

import pytest
from support.gcs_server import GcsServer

from mesh_transformer import files
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.training.run_folder import claim_run_folder, publish

ROOT = "gs://models/run"
# the files that a run in a bucket continues
FILES = ("metrics.jsonl", "experts.jsonl", "samples.jsonl")


@pytest.fixture
def bucket(monkeypatch):
    with GcsServer() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def machine(tmp_path, bucket):
    """The folder of a machine with this name, and a function that adds a line to its files."""

    def at(name):
        folder = tmp_path / name

        def add(text):
            for name in FILES:
                _append(folder / name, text)

        return folder, add

    return at


def _append(path, text):
    with path.open("a") as file:
        file.write(text)


def _read(folder):
    return [(folder / name).read_text() for name in FILES]


def test_what_is_newer_than_the_bucket_stays(machine):
    folder, add = machine("a")
    name = claim_run_folder(ROOT, str(folder))
    add("1\n")
    assert claim_run_folder(ROOT, str(folder)) == name, "killed before its first checkpoint"
    assert _read(folder) == ["1\n"] * len(FILES)
    publish(ROOT, str(folder))
    add("2\n3")
    assert claim_run_folder(ROOT, str(folder)) == name
    assert _read(folder) == ["1\n2\n3"] * len(FILES)


def test_a_machine_that_comes_back(machine):
    """Its steps after the bucket's copy were repeated by another machine."""
    (a, add_a), (b, add_b) = machine("a"), machine("b")
    name = claim_run_folder(ROOT, str(a))
    add_a("1\n")
    publish(ROOT, str(a))
    add_a("2 of a\n3 of a\n")
    assert claim_run_folder(ROOT, str(b)) == name
    add_b("2 of b\n")
    publish(ROOT, str(b))
    assert claim_run_folder(ROOT, str(a)) == name
    assert _read(a) == ["1\n2 of b\n"] * len(FILES)


def test_a_run_that_was_deleted_in_the_bucket(machine):
    folder, add = machine("a")
    name = claim_run_folder(ROOT, str(folder))
    add("1\n")
    for name in ("loss.png", "experts.jsonl", "experts.png", "samples.jsonl"):
        (folder / name).write_text("x")
    (folder / "tensorboard").mkdir()
    (folder / "mine.txt").write_text("x")
    publish(ROOT, str(folder))
    files.remove_tree(ROOT)
    other = claim_run_folder(ROOT, str(folder))
    assert other != name
    assert sorted(path.name for path in folder.iterdir()) == ["mine.txt", "run_id"]
    assert claim_run_folder(ROOT, str(folder)) == other


def test_a_bucket_that_is_not_ours(machine, bucket):
    bucket.fail(403, method="POST")
    with pytest.raises(UserError, match=r"gs://models/run is not writable .*use another bucket"):
        claim_run_folder(ROOT, str(machine("a")[0]))


def test_a_folder_without_a_bucket(tmp_path):
    folder = tmp_path / "run"
    name = claim_run_folder(str(folder), str(folder))
    _append(folder / "metrics.jsonl", "1\n")
    publish(str(folder), str(folder))
    assert claim_run_folder(str(folder), str(folder)) == name
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "run_id"]
