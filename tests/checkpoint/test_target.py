"""A new folder appears complete or not at all, local and in a bucket."""

from pathlib import Path

import pytest
from support.gcs_server import GcsServer

from mesh_transformer import files
from mesh_transformer.checkpoint.target import check_free, new_folder, temporary_path
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Transfer


@pytest.fixture(params=["local", "gs"])
def target(request: pytest.FixtureRequest, tmp_path: Path, gcs: GcsServer) -> str:
    return str(tmp_path / "parent/out") if request.param == "local" else "gs://bucket/parent/out"


def put(folder: str, content: bytes = b"new") -> None:
    files.replace(files.join(folder, "part/file"), content)


def content(folder: str) -> bytes:
    with files.open_binary(files.join(folder, "part/file")) as file:
        return file.read()


def write_and_raise(target: str, error: BaseException, **options: bool | str) -> None:
    with new_folder(target, **options) as folder:
        put(folder)
        raise error


def write_folder(target: str) -> None:
    with new_folder(target) as folder:
        put(folder)


def siblings(target: str) -> list[str]:
    return files.list_dir(target.rpartition("/")[0])


def test_the_folder_appears_at_the_end(target):
    with new_folder(target) as folder:
        put(folder)
        assert not files.list_dir(target)
    assert content(target) == b"new"
    assert siblings(target) == ["out"]


def test_a_failure_leaves_nothing(target):
    with pytest.raises(ZeroDivisionError):
        write_and_raise(target, ZeroDivisionError())
    assert siblings(target) == []


def test_an_existing_folder_is_not_changed(target):
    put(target, b"old")
    with pytest.raises(UserError, match="exists already"), new_folder(target):
        raise AssertionError("the block must not begin")
    assert content(target) == b"old"


@pytest.mark.parametrize("slash", ["", "/"])
def test_overwrite(target, slash):
    put(target, b"old")
    with new_folder(target + slash, overwrite=True) as folder:
        put(folder)
        assert content(target) == b"old"
    assert content(target) == b"new"
    assert siblings(target) == ["out"]


def test_overwrite_that_fails_keeps_the_old(target):
    put(target, b"old")
    with pytest.raises(KeyboardInterrupt):
        write_and_raise(target, KeyboardInterrupt(), overwrite=True)
    assert content(target) == b"old"
    assert siblings(target) == ["out"]


def test_partial_output_of_a_killed_run_is_deleted(target):
    put(temporary_path(target, "partial"), b"half")
    files.replace(files.join(temporary_path(target, "partial"), "part/other"), b"half")
    with new_folder(target) as folder:
        assert not files.list_dir(folder)
        put(folder)
    assert files.list_dir(files.join(target, "part")) == ["file"]
    assert siblings(target) == ["out"]


def test_an_interrupted_replacement_is_undone(tmp_path):
    target = str(tmp_path / "out")
    put(temporary_path(target, "previous"), b"old")
    put(temporary_path(target, "partial"), b"new")
    with pytest.raises(UserError, match="exists already"), new_folder(target):
        raise AssertionError("the block must not begin")
    assert content(target) == b"old"
    # the refused run leaves the partial folder to the next one
    assert siblings(target) == [".out.mtj-partial", "out"]


@pytest.mark.parametrize("name", ["out.tmp", "out.old", "out.moving"])
def test_folders_with_other_names_are_not_changed(target, name):
    put(target, b"old")
    other = files.join(target.rpartition("/")[0], name)
    put(other, b"a backup")
    with pytest.raises(UserError, match="exists already"), new_folder(target):
        raise AssertionError("the block must not begin")
    with new_folder(target, overwrite=True) as folder:
        put(folder)
    assert content(other) == b"a backup"


@pytest.mark.parametrize("inside", ["", "/step_10", "/step_10/shard_0"])
def test_a_target_that_holds_the_source_is_refused(target, inside):
    put(target + inside, b"old")
    with (
        pytest.raises(UserError, match="contains the checkpoint to read"),
        new_folder(target, overwrite=True, source=target + inside),
    ):
        raise AssertionError("the block must not begin")
    assert content(target + inside) == b"old"


def test_the_target_of_a_link_is_replaced(tmp_path):
    put(str(tmp_path / "disk/out"), b"old")
    (tmp_path / "out").symlink_to(tmp_path / "disk/out")
    with new_folder(str(tmp_path / "out"), overwrite=True) as folder:
        put(folder)
    assert (tmp_path / "out").is_symlink()
    assert content(str(tmp_path / "disk/out")) == b"new"


def test_a_failed_move_in_a_bucket_is_completed_by_the_next_run(gcs):
    target = "gs://bucket/parent/out"
    gcs.fail(404, method="POST", path="rewriteTo")
    with pytest.raises(Exception, match="404"):
        write_folder(target)
    assert siblings(target) == [".out.mtj-moving", ".out.mtj-partial"]
    # a check before the next run accepts the target; the run completes the move of the first result
    check_free(target, overwrite=False)
    with pytest.raises(UserError, match="exists already"):
        write_folder(target)
    assert content(target) == b"new"
    assert siblings(target) == ["out"]


@pytest.mark.parametrize("stage", [b"removing\n", b"moving\n"])
def test_an_interrupted_move_in_a_bucket_is_completed(gcs, stage):
    target = "gs://bucket/parent/out"
    put(temporary_path(target, "partial"))
    put(target, b"old")
    gcs.put("bucket", "parent/out/part/stale", b"old")
    gcs.put("bucket", "parent/.out.mtj-moving", stage)
    with pytest.raises(UserError, match="exists already"):
        write_folder(target)
    assert content(target) == b"new"
    assert ("stale" in files.list_dir(files.join(target, "part"))) == (stage == b"moving\n")
    assert siblings(target) == ["out"]


def test_the_marker_is_written_last(target):
    with new_folder(target, marker="done") as folder:
        put(folder)
    assert files.list_dir(target) == ["done", "part"]
    with pytest.raises(ZeroDivisionError):
        write_and_raise(target, ZeroDivisionError(), marker="done", overwrite=True)
    assert content(target) == b"new"
    assert files.list_dir(target) == ["done", "part"]


@pytest.mark.parametrize("interrupted_at", ["POST rewriteTo", "DELETE mtj-partial", "marker", "DELETE mtj-moving"])
def test_an_interrupted_write_to_a_bucket_is_completed_by_the_next_run(gcs, interrupted_at, monkeypatch):
    """Interrupted in the move, the deletion after it, before or after the marker: only a complete folder is marked."""
    target = "gs://bucket/parent/out"

    def write():
        with new_folder(target, marker="done") as folder:
            files.replace(files.join(folder, "zzz"), b"new")
            put(folder)

    def killed(path, content):
        if path.endswith("done"):
            raise OSError("403")
        original(path, content)

    original = files.replace
    if interrupted_at == "marker":
        monkeypatch.setattr(files, "replace", killed)
    else:
        method, path = interrupted_at.split()
        gcs.fail(403, method=method, path=path, times=1000)
    with pytest.raises(Exception, match="403"):
        write()
    assert files.exists(temporary_path(target, "moving"))
    assert ("done" in files.list_dir(target)) == (interrupted_at == "DELETE mtj-moving")
    gcs.faults.clear()
    monkeypatch.undo()
    with pytest.raises(UserError, match="exists already"):
        write()
    assert files.list_dir(target) == ["done", "part", "zzz"]
    assert content(target) == b"new"
    assert siblings(target) == ["out"]


def test_only_a_replaceable_folder_is_replaced(target):
    put(target, b"mine")
    with pytest.raises(UserError, match="no checkpoint of this format, it holds part: choose another folder"):
        write_and_raise(target, AssertionError("the block must not begin"), overwrite=True, replaceable=lambda _: False)
    assert content(target) == b"mine"


@pytest.mark.parametrize("below", ["out", "out/deeper"])
def test_a_folder_below_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file is a file: choose another folder"):
        write_folder(str(tmp_path / "file" / below))


def test_an_existing_file_is_not_replaced(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(UserError, match="is a file"), new_folder(str(tmp_path / "out"), overwrite=True):
        raise AssertionError("the block must not begin")
    assert (tmp_path / "out").read_text() == "mine"


def test_progress_shows_the_rate(capsys, caplog):
    with caplog.at_level("INFO", logger="mesh_transformer"), Transfer("copying", 5_000_000) as transfer:
        transfer.add(5_000_000)
    assert "copying 5/5  rate " in caplog.text
    assert "MB/s" in caplog.text
