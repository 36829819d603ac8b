"""Classic checkpoints in a bucket with faults."""

from pathlib import Path

import pytest
from support.classic_folders import model_config, stored, values, write
from support.gcs_server import CUT, HALF, GcsServer

from mesh_transformer.checkpoint.classic.folder import read_meta, write_meta
from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.target import new_folder
from mesh_transformer.errors import UserError

BUCKET = "gs://bucket/model/step_7"


def put(gcs: GcsServer, folder: Path) -> None:
    for path in folder.glob("*/*.npz"):
        gcs.put("bucket", f"model/step_7/{path.relative_to(folder)}", path.read_bytes())


@pytest.mark.parametrize("status", [503, 429, CUT, HALF])
def test_reading_through_faults(tmp_path, gcs, status):
    source = write(tmp_path, 2)
    put(gcs, tmp_path)
    opened = ClassicSource(BUCKET, model_config())
    gcs.requests.clear()
    gcs.fail(status, method="GET", path=r"alt=media", times=3)
    expected = values(source)
    assert all((array == expected[name]).all() for name, array in values(opened).items())
    assert all(fault.times == 0 for fault in gcs.faults)


def test_a_slice_of_a_checked_array_reads_little_else(tmp_path, gcs):
    write(tmp_path, 1, n_vocab=2400)
    put(gcs, tmp_path)
    source = ClassicSource(BUCKET, model_config(n_vocab=2400))
    name = "params/embed/tokens/w"
    source.read(name, (slice(0, 1), slice(None)))
    before = gcs.bytes_read
    source.read(name, (slice(10, 20), slice(None)))
    # the array has 150 kB
    assert gcs.bytes_read - before < 5000


@pytest.mark.parametrize("status", [503, CUT])
def test_writing_through_faults(tmp_path, gcs, status):
    source = write(tmp_path, 2, full=True)
    gcs.fail(status, method="POST|PUT", times=3)
    with new_folder(BUCKET) as folder:
        write_classic(source, model_config(), folder, 2)
    write_meta(BUCKET, 7, {"train_loader": {"used": 1}})
    assert all(fault.times == 0 for fault in gcs.faults)
    names = {f"model/step_7/{path.relative_to(tmp_path)}" for path in tmp_path.glob("*/*.npz")}
    assert set(gcs.objects("bucket")) == names | {"model/meta.json"}
    copy = tmp_path / "copy"
    for name, content in gcs.objects("bucket").items():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    assert stored(copy / "model/step_7") == stored(tmp_path)
    assert read_meta("gs://bucket/model").aux == {"7": {"train_loader": {"used": 1}}}
    expected = values(source)
    found = ClassicSource(BUCKET, model_config())
    assert found.extra == {"aux": {"train_loader": {"used": 1}}}
    assert all((array == expected[name]).all() for name, array in values(found).items())


def test_a_missing_object_is_named(tmp_path, gcs):
    write(tmp_path, 2)
    put(gcs, tmp_path)
    gcs.delete("bucket", "model/step_7/shard_1/9.npz")
    with pytest.raises(UserError, match="shard_1: 9.npz missing"):
        ClassicSource(BUCKET, model_config())
