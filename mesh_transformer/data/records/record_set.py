"""Any record of a list of plain record files."""

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import IO, NamedTuple

from mesh_transformer import files
from mesh_transformer.data.records.offsets import OFFSET_BYTES, find_offsets
from mesh_transformer.data.records.stamps import stamp_of
from mesh_transformer.data.records.tfrecords import FRAME_BYTES, MAX_RECORD_BYTES, Record, parse_record

# local record files that are open, each with its offsets
_MOST_OPEN = 64
_REQUESTS_AT_ONCE = 16


class RecordFile(NamedTuple):
    """A record file.

    Args:
        bytes: its size.
        records: how many it has.
        offsets: the local file with the offset of each of them.
    """

    path: str
    stamp: str
    bytes: int
    records: int
    offsets: str

    @classmethod
    def of(cls, path: str) -> "RecordFile":
        """The record file at a path, local or `gs://`.

        Raises:
            UserError: it is missing, compressed or damaged.
        """
        stamp = stamp_of(path)
        offsets = find_offsets(path, stamp)
        return cls(path, stamp, files.size(path), os.path.getsize(offsets) // OFFSET_BYTES, offsets)


class RecordSet:
    """The records of plain record files, local or `gs://`, numbered through all files.

    Memory holds some numbers for each file. A local record takes two reads, a record in a bucket one request; requests
    of one call run at the same time. Only one thread at a time may use it.

    Raises:
        UserError: a file is missing, compressed or damaged.
    """

    def __init__(self, paths: Sequence[str]):
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            self.files = tuple(pool.map(RecordFile.of, paths))
        # the number of records up to the end of each file
        self._ends = list(accumulate(file.records for file in self.files))
        # by the place of the file, least recently used first
        self._open: dict[int, tuple[IO[bytes], IO[bytes]]] = {}
        self._pool = ThreadPoolExecutor(_REQUESTS_AT_ONCE)

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, numbers: Sequence[int]) -> list[Record]:
        """The records of these numbers, their checksums verified.

        Raises:
            UserError: a record is damaged; names the file, the record and its offset.
        """
        pending = [self._begin(number) for number in numbers]
        return [record.result() if isinstance(record, Future) else record for record in pending]

    def close(self) -> None:
        """Release the files."""
        self._pool.shutdown()
        while self._open:
            self._close_oldest()

    def _begin(self, number: int) -> Record | Future[Record]:
        """Read a local record, or begin to read one in a bucket."""
        place = bisect_right(self._ends, number)
        path, n_bytes = self.files[place].path, self.files[place].bytes
        inside = number - (self._ends[place - 1] if place else 0)
        records, offsets = self._opened(place)
        pair = os.pread(offsets.fileno(), 2 * OFFSET_BYTES, inside * OFFSET_BYTES)
        begin, *after = struct.unpack(f"<{len(pair) // OFFSET_BYTES}Q", pair)
        # the last record has none after it
        length = (after[0] if after else n_bytes) - begin
        if not 0 <= length <= FRAME_BYTES + MAX_RECORD_BYTES:
            # parse_record says where
            length = 0
        if files.is_remote(path):
            return self._pool.submit(_read_remote, path, inside, begin, length)
        return parse_record(path, inside, begin, os.pread(records.fileno(), length, begin))

    def _opened(self, place: int) -> tuple[IO[bytes], IO[bytes]]:
        """A record file and its offsets. Of a file in a bucket, only the offsets are open."""
        pair = self._open.pop(place, None)
        if pair is None:
            if len(self._open) == _MOST_OPEN:
                self._close_oldest()
            file = self.files[place]
            offsets = open(file.offsets, "rb", buffering=0)  # noqa: SIM115  (`close` closes it)
            pair = (offsets if files.is_remote(file.path) else files.open_binary(file.path), offsets)
        self._open[place] = pair
        return pair

    def _close_oldest(self) -> None:
        for file in self._open.pop(next(iter(self._open))):
            file.close()


def _read_remote(path: str, number: int, offset: int, length: int) -> Record:
    return parse_record(path, number, offset, files.read_range(path, offset, length))
