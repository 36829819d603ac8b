"""CheckpointStore on a bucket of a loopback server."""

import logging

import pytest
from support.gcs_server import CUT, GcsServer
from support.states import abstract, assert_equal, mesh, read_part, shardings, state

from mesh_transformer.checkpoint.store import CheckpointStore
from mesh_transformer.errors import UserError

# Orbax writes and reads all tensors at once and drops the errors after the first
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

ROOT = "gs://bucket/runs/a"


def write(*steps: int, **options: int) -> None:
    store = CheckpointStore(ROOT, **options)
    for step in steps:
        store.save(step, state(step), {"seen": step})
    store.close()


def names(gcs: GcsServer, prefix: str) -> list[str]:
    return [name for name in gcs.objects("bucket") if name.startswith(prefix)]


def test_save_keep_and_restore(gcs: GcsServer) -> None:
    others = ("runs/a/metrics.jsonl", "runs/a/tensorboard/x", "runs/a/set_aside/step_1/x", "runs/ab/step_9/y")
    for name in others:
        gcs.put("bucket", name, b"mine")
    write(1, 2, 3, 4, keep_every=2, keep_latest=1)
    # another process resumes
    write(5, 6, 7, keep_every=2, keep_latest=1)
    reader = CheckpointStore(ROOT, read_only=True)
    assert reader.steps() == [2, 4, 6, 7]
    found = reader.restore(abstract(state(0), shardings(mesh(dp=8), rows="dp")))
    assert found is not None
    assert (found.step, found.extra) == (7, {"seen": 7})
    assert_equal(found.state, state(7))
    assert all(gcs.objects("bucket")[name] == b"mine" for name in others)
    assert names(gcs, "runs/a/step_5") == []
    assert CheckpointStore("gs://bucket/nothing", read_only=True).restore(abstract(state(0))) is None


def test_a_step_without_its_commit_marker_does_not_exist(gcs: GcsServer) -> None:
    write(1, 2, keep_latest=5)
    gcs.delete("bucket", "runs/a/step_2/commit_success.txt")
    reader = CheckpointStore(ROOT, read_only=True)
    assert reader.steps() == [1]
    assert reader.restore(abstract(state(0))).step == 1  # type: ignore[union-attr]
    assert names(gcs, "runs/a/step_2/")
    store = CheckpointStore(ROOT, keep_latest=5)
    assert names(gcs, "runs/a/step_2/") == []
    store.save(2, state(20), {})
    store.close()
    found = reader.restore(abstract(state(0)))
    assert found is not None
    assert_equal(found.state, state(20))
    assert names(gcs, "runs/a/set_aside/") == []


def test_foreign_files_are_not_deleted(gcs: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    """Three folders named like steps: foreign files, the remains of an interrupted save, and both."""
    write(1)
    gcs.put("bucket", "runs/a/step_3/weights.bin", b"mine")
    gcs.put("bucket", "runs/a/step_4/state/d/1", b"half")
    gcs.put("bucket", "runs/a/step_5/state/d/1", b"half")
    gcs.put("bucket", "runs/a/step_5/notes.txt", b"mine")
    store = CheckpointStore(ROOT, keep_latest=5)
    assert names(gcs, "runs/a/step_4/") == []
    assert names(gcs, "runs/a/step_3/") + names(gcs, "runs/a/step_5/") == [
        "runs/a/step_3/weights.bin",
        "runs/a/step_5/notes.txt",
        "runs/a/step_5/state/d/1",
    ]
    warnings = [record.getMessage() for record in caplog.records if "not deleted" in record.getMessage()]
    assert warnings == [
        f"{ROOT}/step_3 is not a checkpoint of this program, it holds ['weights.bin']: not deleted",
        f"{ROOT}/step_5 is not a checkpoint of this program, it holds ['notes.txt']: not deleted",
    ]
    # moves the foreign folder
    store.save(3, state(3), {})
    store.close()
    assert store.steps() == [1, 3]
    assert gcs.objects("bucket")["runs/a/set_aside/step_3/weights.bin"] == b"mine"


def test_a_damaged_step_is_skipped_and_set_aside(gcs: GcsServer) -> None:
    write(1, 2, keep_latest=5)
    manifest = "runs/a/step_2/manifest/metadata"
    gcs.put("bucket", manifest, gcs.objects("bucket")[manifest][:-9])
    damaged = {
        name.removeprefix("runs/a/"): data
        for name, data in gcs.objects("bucket").items()
        if name.startswith("runs/a/step_2/")
    }
    store = CheckpointStore(ROOT, keep_latest=5)
    assert store.restore(abstract(state(0))).step == 1  # type: ignore[union-attr]
    store.save(2, state(20), {})
    store.close()
    found = store.restore(abstract(state(0)))
    assert found is not None
    assert found.step == 2
    assert_equal(found.state, state(20))
    prefix = "runs/a/set_aside/"
    aside = {name.removeprefix(prefix): data for name, data in gcs.objects("bucket").items() if prefix in name}
    assert aside == damaged


@pytest.mark.parametrize("status", [503, CUT], ids=["503", "cut"])
def test_transient_faults_are_retried(gcs: GcsServer, status: int) -> None:
    store = CheckpointStore(ROOT, keep_latest=1)
    store.save(1, state(1), {})
    store.wait()
    for method, path in (("POST|PUT", "step_2/state"), ("GET", "/o"), ("POST|PUT", "step_2/manifest")):
        gcs.fail(status, method=method, path=path)
    store.save(2, state(2), {})
    store.close()
    for path in ("manifest", "state/manifest.ocdbt", "state/d/"):
        gcs.fail(status, method="GET", path=path)
    found = CheckpointStore(ROOT, read_only=True).restore(abstract(state(0)))
    assert found is not None
    assert found.step == 2
    assert_equal(found.state, state(2))
    assert [fault for fault in gcs.faults if fault.times] == []


def test_a_failed_save_raises_and_the_next_save_works(gcs: GcsServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="absl")
    store = CheckpointStore(ROOT, keep_latest=1)
    store.save(1, state(1), {})
    store.wait()
    gcs.fail(403, method="POST|PUT", path="step_2/", times=1000)
    # raised by the save or by the wait
    with pytest.raises(Exception, match=r"403|injected|PERMISSION"):  # noqa: PT012
        store.save(2, state(2), {})
        store.wait()
    gcs.faults.clear()
    assert store.steps() == [1]
    store.save(3, state(3), {})
    store.close()
    assert store.steps() == [3]
    found = store.restore(abstract(state(0)))
    assert found is not None
    assert_equal(found.state, state(3))


def test_reading_a_part_does_not_fetch_the_rest(gcs: GcsServer) -> None:
    # large tensors, because TensorStore also reads gaps of up to 1 MB between chunks
    width, one = 80_000, shardings(mesh())
    store = CheckpointStore(ROOT)
    store.save(1, state(1, one, width), {})
    store.close()
    wanted = abstract(state(0, one, width))
    fetched = []
    for part in ({"params": wanted.params}, {"moments": wanted.moments}):
        before = gcs.bytes_read
        found = read_part(store.folder(1), part)
        assert_equal(found, {name: getattr(state(1, one, width), name) for name in part})
        fetched.append(gcs.bytes_read - before)
    params, moments = 16 * width * 4 + width * 2, 16 * width * 2
    assert fetched[0] < params * 1.1
    assert fetched[1] < moments * 1.1


def test_an_unreachable_checkpoint_is_an_error(gcs: GcsServer) -> None:
    write(1)
    gcs.fail(403, method="GET", path="step_1/manifest/metadata", times=1000)
    with pytest.raises(UserError, match=r"(?s)step 1: Forbidden: 403"):
        CheckpointStore(ROOT, read_only=True).restore(abstract(state(0)))
