"""Files of inputs: folders, patterns, buckets, the hub; shares."""

import os
from pathlib import Path

import pytest
from support.corpora import as_parquet, documents, parts_of
from support.gcs_server import GcsServer
from support.hub_server import HubServer

from mesh_transformer.dataset.inputs import read_inputs
from mesh_transformer.dataset.parts import plan
from mesh_transformer.errors import UserError

FILES = ["a.jsonl", "b.JSONL.gz", "sub/c.txt", "sub/deep/d.csv.zst", "sub/e.parquet", "f.tar", "g.tgz"]
FORMATS = {"a": "lines", "b": "lines", "c": "text", "d": "csv", "e": "parquet", "f": "tar", "g": "tar"}


def make(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())


def names_of(folder: Path | str, *specs: str) -> list[str]:
    """The files of all inputs, below a folder."""
    return [file.path.removeprefix(f"{folder}/") for one in read_inputs(specs) for file in one.files]


def test_a_folder_has_all_files_below_it(tmp_path: Path) -> None:
    make(tmp_path, *FILES, ".hidden.bin", ".git/x.txt", "sub/.DS_Store")
    (found,) = read_inputs([str(tmp_path)])
    assert [file.path for file in found.files] == sorted(str(tmp_path / name) for name in FILES)
    assert {Path(file.path).name[0]: file.format for file in found.files} == FORMATS
    assert all(file.size == os.path.getsize(file.path) for file in found.files)
    assert (found.spec, found.share) == (str(tmp_path), 1.0)


def test_paths_are_absolute_and_specs_as_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "sub/c.txt")
    monkeypatch.chdir(tmp_path)
    (found,) = read_inputs(["sub=0.5"])
    assert (found.spec, found.share, found.files[0].path) == ("sub", 0.5, str(tmp_path / "sub/c.txt"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.jsonl", ["a.jsonl"]),
        ("**/*.txt", ["sub/c.txt"]),
        ("s?b", ["sub/c.txt", "sub/deep/d.csv.zst", "sub/e.parquet"]),
        ("sub/*.[tp]*", ["sub/c.txt", "sub/e.parquet"]),
        ("**", sorted(FILES)),
        ("sub/**/d.*", ["sub/deep/d.csv.zst"]),
    ],
)
def test_patterns_match_the_same_here_and_in_a_bucket(
    tmp_path: Path, gcs: GcsServer, pattern: str, names: list[str]
) -> None:
    make(tmp_path, *FILES, ".hidden.txt")
    for name in [*FILES, ".hidden.txt"]:
        gcs.put("bucket", f"in/{name}", name.encode())
    # a folder as Google's console makes it
    gcs.put("bucket", "in/sub/", b"")
    assert names_of(tmp_path, f"{tmp_path}/{pattern}") == names
    assert names_of("gs://bucket/in", f"gs://bucket/in/{pattern}") == names


def test_names_in_a_bucket(gcs: GcsServer) -> None:
    for name in ("in/a.jsonl", "in/sub/b.txt", "inner/c.txt", "in.txt", "part-0.jsonl", "part-1.jsonl", "in/.x/d.bin"):
        gcs.put("bucket", name, b"12345")
    (found,) = read_inputs(["gs://bucket/in/a.jsonl"])
    assert [(file.path, file.size) for file in found.files] == [("gs://bucket/in/a.jsonl", 5)]
    for folder in ("gs://bucket/in", "gs://bucket/in/"):
        assert names_of("gs://bucket", folder) == ["in/a.jsonl", "in/sub/b.txt"]
    # the beginning of names
    assert names_of("gs://bucket", "gs://bucket/part-=0.25") == ["part-0.jsonl", "part-1.jsonl"]
    with pytest.raises(UserError, match="no object has a name that begins with gs://bucket/none"):
        read_inputs(["gs://bucket/none"])
    with pytest.raises(UserError, match="no object matches"):
        read_inputs(["gs://bucket/*.csv"])
    with pytest.raises(UserError, match="expected gs://BUCKET/NAME"):
        read_inputs(["gs:///a.txt"])


@pytest.mark.parametrize(("spec", "share"), [("a.txt=0.3", 0.3), ("a.txt=1", 1.0), ("a.txt=1e-3", 1e-3)])
def test_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str, share: float) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "a.txt")
    (found,) = read_inputs([spec])
    assert (found.spec, found.share) == ("a.txt", share)


@pytest.mark.parametrize("spec", ["a.txt=0", "a.txt=-0.1", "a.txt=1.01", "a.txt=nan", "a.txt=inf", "=0.5"])
def test_a_share_out_of_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "a.txt")
    with pytest.raises(UserError, match="must be above 0 and at most 1; there is no file"):
        read_inputs([spec])


def test_a_name_with_an_equals_sign_is_a_name_where_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gcs: GcsServer
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "year=2024/a.txt", "year/b.txt", "part=0.5", "kind=x/c.txt")
    assert [(one.spec, one.share) for one in read_inputs(["year=2024", "kind=x"])] == [("year=2024", 1), ("kind=x", 1)]
    with pytest.raises(UserError, match="unknown kind"):
        read_inputs(["part=0.5"])
    gcs.put("bucket", "v=0.5/a.txt", b"x")
    gcs.put("bucket", "w/a.txt", b"x")
    gcs.put("bucket", "w=0.55/a.txt", b"x")
    assert [(one.spec, one.share) for one in read_inputs(["gs://bucket/v=0.5", "gs://bucket/w=0.5"])] == [
        ("gs://bucket/v=0.5", 1),
        ("gs://bucket/w", 0.5),
    ]


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "no input: give at least one --input"),
        (["none"], r"no such file or folder: none \(the current folder is "),
        (["none=0.3"], r"no such file or folder: none \(the current folder is "),
        (["*.csv"], r"no file matches \*\.csv"),
        (["empty"], "empty: no file in this folder; allowed: .jsonl, .json, .csv"),
        (["mixed"], r"mixed: 2 files of an unknown kind: .*mixed/b\.pdf, .*mixed/c\.parquet\.gz; allowed: \.jsonl"),
        (["mixed/b.pdf"], r"1 file of an unknown kind: .*b\.pdf"),
        (["a.txt", "a.txt=0.5"], "the input a.txt is given 2 times: give it once"),
        (["sub", "sub/"], "the input sub is given 2 times"),
        (["sub", "sub/deep/*.txt"], r"deep/d\.txt is in two inputs, sub and sub/deep/\*\.txt: choose inputs without"),
        (["a.txt", "./a.txt"], r"a\.txt is in two inputs, a\.txt and \./a\.txt"),
        (["pipes"], r"pipes/x\.txt is neither a file nor a folder"),
        (["links"], r"links/x\.txt cannot be read: No such file"),
        (["hf://org/name"], "no data set of the hub: expected hf://datasets/ORG/NAME"),
        (["hf://datasets/org/../name"], "is not a data set on the Hugging Face hub: expected hf://datasets/ORG/NAME"),
    ],
)
def test_refused_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, specs: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "a.txt", "mixed/a.txt", "mixed/b.pdf", "mixed/c.parquet.gz", "sub/deep/d.txt", "empty/.hidden")
    for folder in ("pipes", "links"):
        (tmp_path / folder).mkdir()
    os.mkfifo(tmp_path / "pipes/x.txt")
    (tmp_path / "links/x.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match=message):
        read_inputs(specs)


def test_files_without_bytes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, "a.txt")
    (tmp_path / "b.jsonl").touch()
    read_inputs([str(tmp_path)])
    assert f"1 file has no bytes: {tmp_path}/b.jsonl" in caplog.text


def table(name: str) -> bytes:
    return as_parquet([f"{name} {n}" for n in range(6)], rows=2)


def test_a_data_set_of_the_hub(hub_server: HubServer) -> None:
    names = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000.parquet"]
    files = {name: table(name) for name in names} | {"README.md": b"# x", "data/extra.json": b"{}"}
    commit = hub_server.commit("datasets/org/name", files)
    (found,) = inputs = read_inputs(["hf://datasets/org/name:train=0.5"])
    assert (found.spec, found.share) == ("hf://datasets/org/name:train", 0.5)
    assert [(file.path, file.size) for file in found.files] == [
        (f"hf://datasets/org/name@{commit}/{name}", len(files[name])) for name in names[:2]
    ]
    # a later commit changes nothing
    hub_server.commit("datasets/org/name", {"data/train.parquet": b"x"})
    hub_server.requests.clear()
    parts = plan(inputs, 1, "text")
    # the footers only, and no file is in the cache
    assert len(parts) == 6
    assert sorted(hub_server.downloads()) == names[:2]
    assert documents(parts) == [f"{name} {n}" for name in names[:2] for n in range(6)]
    # each file once
    assert sorted(hub_server.downloads()) == sorted(2 * names[:2])


def test_folders_and_revisions_of_a_data_set(hub_server: HubServer) -> None:
    files = {f"{folder}/{split}/0.parquet": b"x" for folder in ("en", "de") for split in ("train", "validation")}
    commit = hub_server.commit("datasets/org/name", files)
    hub_server.commit("datasets/org/name", {}, branch="empty")
    hub_server.commit("datasets/plain", {"x/strain-0.parquet": b"x"}, branch="refs/convert/parquet")

    def found(spec: str) -> list[str]:
        return names_of(f"hf://datasets/org/name@{commit}", spec)

    assert found("hf://datasets/org/name/en:train") == ["en/train/0.parquet"]
    assert found(f"hf://datasets/org/name@{commit}:validation") == [
        "de/validation/0.parquet",
        "en/validation/0.parquet",
    ]
    assert len(names_of("", "hf://datasets/plain@refs/convert/parquet")) == 1
    for spec, message in [
        ("hf://datasets/org/name", r"has files of the splits train, validation: choose one, such as .*name:train"),
        ("hf://datasets/org/name:test", "no .parquet file of the split test; its files show the splits train, valid"),
        ("hf://datasets/org/name/fr:train", "no .parquet file in the folder fr. The hub keeps a converted copy"),
        ("hf://datasets/org/name@empty", "no .parquet file. The hub keeps"),
        ("hf://datasets/org/name@none", "no such branch, tag or commit"),
        ("hf://datasets/org/none", "no such repository"),
    ]:
        with pytest.raises(UserError, match=message):
            read_inputs([spec])


def test_a_data_set_that_may_not_be_read(hub_server: HubServer) -> None:
    hub_server.commit("datasets/org/gated", {"train.parquet": table("x")}, gated=True)
    inputs = read_inputs(["hf://datasets/org/gated"])
    with pytest.raises(UserError, match="is gated: accept its conditions"):
        plan(inputs, 100, "text")


def test_parts_of_a_share_are_the_parts_of_the_whole(tmp_path: Path) -> None:
    """The share is taken of documents, after they are read."""
    make(tmp_path, "a.txt")
    assert parts_of(f"{tmp_path}=0.5") == parts_of(tmp_path)
