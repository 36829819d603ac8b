"""Reads TensorBoard's event files."""

from pathlib import Path
from typing import Any


def read_events(folder: Path) -> list[Any]:
    """The events of the only file in `folder`, in the order in which they were written."""
    from tensorboardX.proto.event_pb2 import Event

    (path,) = folder.iterdir()
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        # a record: its length, a checksum, the event, a checksum
        size = int.from_bytes(data[at : at + 8], "little")
        found.append(Event.FromString(data[at + 12 : at + 12 + size]))
        at += 16 + size
    return found
