"""Any record of a set of files: by offsets beside them or found at first use, local and in a bucket."""

import gzip
import random
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from mesh_transformer import files
from mesh_transformer.cache_folders import data_sets
from mesh_transformer.data.records import record_set
from mesh_transformer.data.records.record_set import RecordSet
from mesh_transformer.data.records.tfrecords import RecordReader, write_records
from mesh_transformer.errors import UserError

COUNTS = (3, 0, 5, 1)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def paths(tmp_path):
    """Record k of all files holds k + 1 tokens of k, so that no two records have the same length."""
    first, made = 0, []
    for number, count in enumerate(COUNTS):
        made.append(str(tmp_path / f"{number}.tfrecords"))
        write_records(made[-1], [np.full(k + 1, k) for k in range(first, first + count)])
        first += count
    return made


def offsets_of(path):
    found = [0]
    with RecordReader(path) as reader:
        while reader.read() is not None:
            found.append(reader.offset)
    return np.array(found[:-1], "<u8")


def content(records):
    return [record.example().tokens.tolist() for record in records]


def test_any_record_of_any_file(paths, monkeypatch):
    monkeypatch.setattr(record_set, "_MOST_OPEN", 2)
    records = RecordSet(paths)
    assert len(records) == 9
    numbers = random.Random(0).choices(range(9), k=100)
    assert content(records.read(numbers)) == [[k] * (k + 1) for k in numbers]
    assert len(records._open) <= 2
    (last,) = records.read([8])
    assert last.place == f"{paths[3]}: record 0 at byte 0"
    records.close()
    assert not records._open


def test_offsets_are_found_once(paths, caplog):
    caplog.set_level("INFO")
    RecordSet(paths).close()
    assert len(caplog.messages) == 4
    RecordSet(paths).close()
    assert len(caplog.messages) == 4
    # another file of this name and size has other offsets
    write_records(paths[0], [np.full(k + 1, k) for k in (2, 1, 0)])
    assert content(RecordSet(paths).read([0, 1, 2])) == [[2] * 3, [1] * 2, [0]]


def test_offsets_beside_the_file_are_used(paths, tmp_path):
    for path in paths:
        offsets_of(path).tofile(path + ".offsets")
    assert content(RecordSet(paths).read(range(9))) == [[k] * (k + 1) for k in range(9)]
    assert not (tmp_path / "cache").exists()
    assert data_sets().startswith(str(tmp_path))


def changed(number: int, value: int):
    """Offsets with another value at a place."""

    def change(offsets):
        offsets[number] = value
        return offsets

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda offsets: offsets[:-1],
        lambda offsets: offsets + 8,
        lambda offsets: offsets[:0],
        lambda offsets: offsets[1:],
        lambda offsets: offsets[[0, 0, 1, 2]],
        lambda offsets: offsets[[1, 0, 2]],
        lambda offsets: np.append(offsets, 2**64 - 1),
        lambda offsets: offsets.view(np.uint8)[:7],
        lambda offsets: offsets.view(np.uint8)[:-1],
        changed(0, 16),
        changed(1, 1 << 63),
        changed(2, 1 << 63),
        changed(2, (1 << 63) - 1),
    ],
)
def test_offsets_of_other_records_are_refused(paths, change):
    change(offsets_of(paths[0])).tofile(paths[0] + ".offsets")
    with pytest.raises(UserError, match=r"0.tfrecords.offsets does not fit .*0.tfrecords.*delete it"):
        RecordSet(paths)


def test_long_offsets_in_a_bucket_are_not_downloaded(paths, gcs, tmp_path):
    remote = "gs://bucket/a.tfrecords"
    files.upload(paths[0], remote)
    (tmp_path / "long").write_bytes(bytes(1000))
    files.upload(str(tmp_path / "long"), remote + ".offsets")
    with mock.patch.object(files, "download") as download, pytest.raises(UserError, match="does not fit"):
        RecordSet([remote])
    assert not download.called


def test_damage_is_told_with_its_place(paths):
    begins = offsets_of(paths[2])
    data = bytearray(Path(paths[2]).read_bytes())
    records = RecordSet(paths)
    for at, what in ((20, "checksum of its data"), (2, "checksum of its length")):
        broken = bytearray(data)
        broken[int(begins[1]) + at] ^= 1
        Path(paths[2]).write_bytes(broken)
        with pytest.raises(UserError, match=f"2.tfrecords: record 1 at byte {begins[1]}: the {what} does not match"):
            records.read([4])
    Path(paths[2]).write_bytes(data[:-1])
    with pytest.raises(UserError, match="record 4 at byte .*it claims"):
        records.read([7])


def test_a_compressed_file_is_refused_by_name(paths):
    data = Path(paths[2]).read_bytes()
    Path(paths[2]).write_bytes(gzip.compress(data))
    with pytest.raises(UserError, match=r"2.tfrecords is compressed, .*decompress it, or read it as the only"):
        RecordSet(paths)


@pytest.mark.parametrize("beside", [False, True])
def test_records_of_a_bucket(paths, gcs, beside):
    remote = []
    for path in paths:
        remote.append(f"gs://bucket/{path.rpartition('/')[2]}")
        files.upload(path, remote[-1])
        if beside:
            offsets_of(path).tofile(path + ".offsets")
            files.upload(path + ".offsets", remote[-1] + ".offsets")
    records = RecordSet(remote)
    numbers = [8, 0, 4, 4, 7]
    assert content(records.read(numbers)) == [[k] * (k + 1) for k in numbers]
