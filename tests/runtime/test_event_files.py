"""TensorBoard event files, read by the protocol buffers of another library."""

from __future__ import annotations

import math
import struct
import time

import pytest

from mesh_transformer.data.records import RecordReader
from mesh_transformer.logs import TensorBoard


def test_what_was_written_is_read(tmp_path):
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")
    began = time.time()
    board = TensorBoard(str(tmp_path / "tensorboard"))
    steps = {
        1: {"train/loss": 5.5, "val/loss_held": -1e-30},
        300: {"train/loss": math.nan},
        2**40: {"a": 1e300, "b": -math.inf},
    }
    for step, scalars in steps.items():
        board.write(step, scalars)
    (path,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    events = []
    with RecordReader(str(path)) as reader:  # with all checksums; before the file is closed
        while (record := reader.read()) is not None:
            events.append(event_pb2.Event.FromString(record.data))
    board.close()
    assert events[0].file_version == "brain.Event:2"
    assert all(began <= event.wall_time <= time.time() for event in events)
    assert [event.step for event in events[1:]] == list(steps)
    expected = [
        [("train/loss", 5.5), ("val/loss_held", -1e-30)],
        [("train/loss", math.nan)],
        [("a", math.inf), ("b", -math.inf)],
    ]
    for event, values in zip(events[1:], expected, strict=True):
        found = [(value.tag, value.simple_value) for value in event.summary.value]
        assert found == [
            (tag, pytest.approx(_single(value), nan_ok=True, rel=0, abs=0)) for tag, value in values
        ]


def _single(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_a_run_that_goes_on_has_a_second_file(tmp_path):
    for _ in range(2):
        TensorBoard(str(tmp_path)).close()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 2
