"""Index files."""

from pathlib import Path

import pytest

from mesh_transformer.data.records import sources
from mesh_transformer.data.records.sources import find_source, record_files
from mesh_transformer.errors import UserError


def test_an_index_has_at_most_100_000_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "a.index"
    index.write_text("a.tfrecords\n" * 100_001)
    monkeypatch.setattr(sources, "_find_listed", lambda *_: pytest.fail("a lookup"))
    with pytest.raises(UserError, match=r"a\.index lists 100,001 record files, at most 100,000 are allowed"):
        record_files(str(index))


def test_an_index_ends_at_its_first_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.tfrecords").touch()
    index = tmp_path / "a.index"
    index.write_text("a.tfrecords\n" * 40 + "b.tfrecords\n" * 10_000)
    asked: list[int] = []
    original = sources._find_listed
    monkeypatch.setattr(sources, "_find_listed", lambda *at: (asked.append(at[1]), original(*at))[1])
    with pytest.raises(UserError, match=r"a\.index, line 41: record file not found"):
        record_files(str(index))
    assert len(asked) < 100


def test_the_folder_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/mine").mkdir(parents=True)
    for name in ("train.index", "train.txt", "val.txt"):
        (tmp_path / "data/mine" / name).touch()
    for folder in ("mine", "data/mine", str(tmp_path / "data/mine")):
        assert Path(find_source(folder)).samefile("data/mine/train.index")
        assert Path(find_source(folder, "val")).samefile("data/mine/val.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"tried empty and data/empty: .* or a folder with val\.index or val\.txt"):
        find_source("empty", "val")
