"""Local and gs:// files, with storage calls that sometimes fail."""

import threading
from pathlib import Path

import pytest
from support.gcs_server import CUT, GcsServer
from support.waiting import until

from mesh_transformer import files
from mesh_transformer.errors import UserError
from mesh_transformer.liveness import Watch


@pytest.fixture(params=["local", "gs"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, gcs: GcsServer) -> str:
    return str(tmp_path / "f") if request.param == "local" else "gs://bucket/f"


@pytest.fixture
def metrics(tmp_path: Path) -> str:
    path = tmp_path / "source.jsonl"
    path.write_bytes(b'{"loss": 1}\n' * 1000)
    return str(path)


def read(path: str) -> bytes:
    with files.open_binary(path) as stream:
        return stream.read()


def test_a_tree(folder: str, metrics: str) -> None:
    assert files.list_dir(folder) == []
    for name in ("a", "b/c", "b/d/e", "bb"):
        files.upload(metrics, files.join(folder, name))
    assert files.list_dir(folder) == ["a", "b", "bb"]
    assert files.list_dir(files.join(folder, "b")) == ["c", "d"]
    assert files.exists(files.join(folder, "b/c"))
    assert not files.exists(files.join(folder, "c"))
    files.move_tree(files.join(folder, "b"), files.join(folder, "z/b"))
    assert files.list_dir(folder) == ["a", "bb", "z"]
    assert read(files.join(folder, "z/b/d/e")) == Path(metrics).read_bytes()
    files.remove_tree(files.join(folder, "z"))
    assert files.list_dir(folder) == ["a", "bb"]


def test_upload_replaces_and_empty_files_are_files(folder: str, metrics: str, tmp_path: Path) -> None:
    target = files.join(folder, "metrics.jsonl")
    files.upload(metrics, target)
    Path(metrics).write_bytes(b"")
    files.upload(metrics, target)
    assert read(target) == b""
    assert files.list_dir(folder) == ["metrics.jsonl"]
    with pytest.raises(UserError, match="no such file: .*absent"):
        files.upload(str(tmp_path / "absent"), target)


@pytest.mark.parametrize("read_bytes", [1, 7, 1000])
def test_a_buffer_is_filled_as_far_as_the_file_goes(
    folder: str, metrics: str, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr(files, "REMOTE_READ_BYTES", read_bytes)
    Path(metrics).write_bytes(bytes(range(100)))
    files.upload(metrics, files.join(folder, "x"))
    for start, length in ((0, 100), (30, 21), (90, 30), (100, 5), (200, 5), (3, 0)):
        buffer = bytearray(b"\xff" * length)
        count = files.read_into(files.join(folder, "x"), start, memoryview(buffer))
        assert count == len(range(100)[start : start + length])
        assert buffer == bytes(range(100))[start : start + length] + b"\xff" * (length - count)


def test_write_seek_and_read(folder: str, tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    # must not be decompressed
    path = files.join(folder, "x.gz")
    with files.open_binary(path, "wb") as stream:
        stream.write(b"0123456789" * 100_000)
    with files.open_binary(path) as stream:
        stream.seek(500_003)
        assert stream.read(4) == b"3456"
    with pytest.raises(UserError, match="no such"):
        files.open_binary(files.join(folder, "absent"))


def test_a_write_that_fails_leaves_no_object(gcs: GcsServer) -> None:
    """gcsfs would finish the object with what was written so far."""

    def write_half() -> None:
        with files.open_binary("gs://bucket/x", "wb") as stream:
            stream.write(b"half")
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        write_half()
    assert gcs.objects("bucket") == {}


@pytest.mark.parametrize("status", [408, 429, 500, 503, CUT])
def test_every_call_survives_transient_faults(
    gcs: GcsServer, metrics: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "RETRY_FIRST_S", 0.01)
    path, data = "gs://bucket/run/metrics.jsonl", Path(metrics).read_bytes()

    def failing_twice(method: str, call: str) -> None:
        assert not any(fault.times for fault in gcs.faults), f"before {call}: a fault did not occur"
        gcs.fail(status, method=method, times=2)

    failing_twice("POST", "upload")
    files.upload(metrics, path)
    failing_twice("GET", "exists")
    assert files.exists(path)
    failing_twice("GET", "read")
    assert read(path) == data
    failing_twice("GET", "list")
    assert files.list_dir("gs://bucket/run") == ["metrics.jsonl"]
    failing_twice("POST", "move")
    files.move_tree("gs://bucket/run", "gs://bucket/moved")
    failing_twice("DELETE", "remove")
    files.remove_tree("gs://bucket/moved")
    failing_twice("POST|PUT", "write")
    with files.open_binary(path, "wb") as stream:
        stream.write(data)
    assert not any(fault.times for fault in gcs.faults)
    assert gcs.objects("bucket") == {"run/metrics.jsonl": data}


def test_a_lasting_fault_is_raised(gcs: GcsServer, metrics: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(files, "RETRY_TOTAL_S", 0.3)
    gcs.fail(503, times=10_000)
    with pytest.raises(Exception, match="503"):
        files.exists("gs://bucket/x")
    requests = len(gcs.requests)
    assert requests > 2
    gcs.faults.clear()
    gcs.fail(403, times=10_000)
    with pytest.raises(Exception, match="403"):
        files.upload(metrics, "gs://bucket/x")
    assert len(gcs.requests) == requests + 1


def test_a_retried_call_is_not_a_hang(gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RETRY_FIRST_S", 1.0)
    gcs.fail(503, times=1)
    watch = Watch(cpu=lambda: 0.0, disk=lambda: False)
    call = threading.Thread(target=files.exists, args=["gs://bucket/x"])
    call.start()
    until(lambda: gcs.requests)
    watch.at_work()
    # no other record of progress in between
    assert watch.at_work()
    call.join()
    assert watch.at_work()
    assert not watch.at_work()
    assert len(gcs.requests) == 2
