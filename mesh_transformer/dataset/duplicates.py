"""Exact duplicates: of documents with the same text, the first in input order stays. Memory is bounded.

Three kinds of tasks, each with an object. A slice is a range of rows of a fragment's table; a group is some slices.

1. sort: the rows of a group as (hash, fragment, row), sorted, so that one bucket of hashes lies in one range. Of equal
   hashes in the group, the first stays; the repeated rows are dropped.
2. bucket: the rows of all groups whose hashes are in one bucket. Of equal hashes, the first stays. The drops are sorted
   by fragment and row, so that the drops of one group lie in one range.
3. keep: the kept documents of each slice of a group, as runs of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from mesh_transformer.dataset.counts import ROW, DocumentCounts
from mesh_transformer.dataset.fragment import Fragment
from mesh_transformer.dataset.objects import spool, write_object
from mesh_transformer.files import COPY_BYTES, copy_range, read_range

# (hash, fragment, row) as bytes that sort like the numbers: 24 bytes
KEY = np.dtype([("hash", "V16"), ("fragment", ">u4"), ("row", ">u4")])
_SORTED = np.dtype(f"S{KEY.itemsize}")
DROP = np.dtype([("fragment", "<u4"), ("row", "<u4")])
RUN = np.dtype([("first", "<u8"), ("stop", "<u8")])
LENGTHS = np.dtype([("tokens", "<u8"), ("bytes", "<u8")])
# limits of a group: its rows are in memory, and the result has its slices
GROUP_ROWS, GROUP_SLICES = 4 << 20, 1024
# a slice is read at once
SLICE_ROWS = 1 << 20


@dataclass(frozen=True)
class TableRows:
    """Rows of a fragment's table.

    Args:
        fragment: its number.
        path: its object.
        at: where the first row begins in the object.
        first: number of the first row.
        train, val: how many rows belong to each side.
    """

    fragment: int
    path: str
    at: int
    first: int
    train: int
    val: int

    @property
    def rows(self) -> int:
        return self.train + self.val

    def table(self, side: int) -> Range:
        """The rows of a side."""
        at = self.at + self.train * ROW.itemsize * side
        return Range(self.path, at, (self.train, self.val)[side] * ROW.itemsize)

    def read(self) -> np.ndarray:
        """The rows, ROW (rows,)."""
        return np.frombuffer(read_range(self.path, self.at, self.rows * ROW.itemsize), ROW)


@dataclass(frozen=True)
class Sorted:
    """The rows of a group, KEY: bucket i has the rows `ends[i - 1]` to `ends[i]`. After them the drops, DROP, and the
    lengths of all documents of the group in input order, LENGTHS."""

    ends: tuple[int, ...]
    drops: int
    at: int = 0

    def bucket(self, path: str, number: int) -> Range:
        """The rows of a bucket."""
        return _range(path, self.at, self.ends, number, KEY)

    def dropped(self, path: str) -> Range:
        """The drops."""
        return Range(path, self.at + self.ends[-1] * KEY.itemsize, self.drops * DROP.itemsize)

    def lengths(self, path: str) -> Range:
        """The lengths."""
        drops = self.dropped(path)
        return Range(path, drops.at + drops.length, (self.ends[-1] + self.drops) * LENGTHS.itemsize)


@dataclass(frozen=True)
class Bucket:
    """The drops of a bucket, DROP: group i has the drops `ends[i - 1]` to `ends[i]`."""

    ends: tuple[int, ...]
    at: int = 0

    def group(self, path: str, number: int) -> Range:
        """The drops of a group."""
        return _range(path, self.at, self.ends, number, DROP)


@dataclass(frozen=True)
class Range:
    """Bytes of an object."""

    path: str
    at: int
    length: int


@dataclass(frozen=True)
class KeptSide:
    """The kept documents of one side of a slice.

    Args:
        counts: of the kept documents.
        tokens: of the slice, with the duplicates.
        runs: the number of runs of kept tokens.
    """

    counts: DocumentCounts
    tokens: int
    runs: int


@dataclass(frozen=True)
class Kept:
    """The kept documents of a group: for each slice, for each side. The payload has the runs of the training
    documents of all slices, then of the validation documents: RUN, in tokens from the beginning of the slice's side."""

    slices: tuple[tuple[KeptSide, KeptSide], ...]
    at: int = 0


def slices_of(number: int, path: str, fragment: Fragment, rows: int) -> Iterator[TableRows]:
    """The slices of a fragment, in order. A slice has at most the rows of a group."""
    train, size = fragment.train.documents, min(SLICE_ROWS, rows)
    for first in range(0, fragment.documents, size):
        stop = min(first + size, fragment.documents)
        of_train = min(max(train - first, 0), stop - first)
        yield TableRows(number, path, fragment.at + first * ROW.itemsize, first, of_train, stop - first - of_train)


def groups_of(slices: Sequence[TableRows], rows: int) -> list[list[TableRows]]:
    """Slices in a row whose tables fit in memory together."""
    groups: list[list[TableRows]] = []
    size = 0
    for table_slice in slices:
        if not groups or size + table_slice.rows > rows or len(groups[-1]) == GROUP_SLICES:
            groups.append([])
            size = 0
        groups[-1].append(table_slice)
        size += table_slice.rows
    return groups


def bucket_bounds(buckets: int) -> np.ndarray:
    """The first hash of the buckets 1, 2, ..., as `_SORTED` (buckets - 1,)."""
    bounds = [((i << 128) // buckets).to_bytes(16, "big").ljust(_SORTED.itemsize, b"\0") for i in range(1, buckets)]
    return np.frombuffer(b"".join(bounds), _SORTED)


def sort_group(target: str, scratch: str, group: Sequence[TableRows], buckets: int) -> Sorted:
    """The rows of a group, sorted."""
    keys = np.empty(sum(table_slice.rows for table_slice in group), KEY)
    at = 0
    with spool(scratch) as lengths:
        for table_slice in group:
            rows, part = table_slice.read(), keys[at : at + table_slice.rows]
            part["hash"] = rows["hash"]
            part["fragment"] = table_slice.fragment
            part["row"] = np.arange(table_slice.first, table_slice.first + table_slice.rows)
            lengths.write(rows[list(LENGTHS.names or ())].astype(LENGTHS).tobytes())
            at += table_slice.rows
        keys, drops = _without_repeated(keys)
        ends = (*np.searchsorted(keys.view(_SORTED), bucket_bounds(buckets)).tolist(), len(keys))
        lengths.seek(0)
        blocks = iter(lambda: lengths.read(COPY_BYTES), b"")
        arrays = [keys.view(np.uint8).data, drops.view(np.uint8).data]
        return write_object(target, scratch, Sorted(ends, len(drops)), chain(arrays, blocks))


def find_duplicates(target: str, scratch: str, ranges: Sequence[Range], firsts: Sequence[tuple[int, int]]) -> Bucket:
    """The rows of a bucket that are dropped.

    Args:
        ranges: the bucket's range of each group.
        firsts: fragment and row at which the groups 1, 2, ... begin.
    """
    keys = np.empty(sum(byte_range.length for byte_range in ranges) // KEY.itemsize, KEY)
    at, content = 0, keys.view(np.uint8)
    for byte_range in ranges:
        content[at : at + byte_range.length] = np.frombuffer(
            read_range(byte_range.path, byte_range.at, byte_range.length), np.uint8
        )
        at += byte_range.length
    _, drops = _without_repeated(keys)
    bounds = [_place(np.array(fragment), np.array(row)) for fragment, row in firsts]
    places = _place(drops["fragment"], drops["row"])
    ends = (*np.searchsorted(places, np.array(bounds, np.uint64)).tolist(), len(places))
    return write_object(target, scratch, Bucket(ends), [drops.tobytes()])


def _without_repeated(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the first key of each hash, sorted, KEY; the repeated keys, by fragment and row, DROP). Sorts `keys` in
    place."""
    keys.view(_SORTED).sort()
    hashes = keys["hash"]
    repeated = np.concatenate(([False] * min(1, len(keys)), hashes[1:] == hashes[:-1])).astype(bool)
    places = np.sort(_place(keys["fragment"][repeated], keys["row"][repeated]))
    drops = np.empty(len(places), DROP)
    drops["fragment"], drops["row"] = places >> np.uint64(32), places & np.uint64(0xFFFFFFFF)
    return (keys[~repeated] if len(drops) else keys), drops


def _range(path: str, at: int, ends: Sequence[int], number: int, row: np.dtype) -> Range:
    first = ends[number - 1] if number else 0
    return Range(path, at + first * row.itemsize, (ends[number] - first) * row.itemsize)


def keep_rest(target: str, scratch: str, group: Sequence[TableRows], lengths: Range, ranges: Sequence[Range]) -> Kept:
    """The kept documents of a group.

    Args:
        lengths: where the lengths of its documents are.
        ranges: where its drops are: in its own sorted rows, and in each bucket.
    """
    drops = np.frombuffer(
        b"".join(read_range(byte_range.path, byte_range.at, byte_range.length) for byte_range in ranges), DROP
    )
    place = np.sort(_place(drops["fragment"], drops["row"]))
    slices = []
    runs: tuple[list[bytes], list[bytes]] = [], []
    with spool(scratch) as table:
        copy_range(lengths.path, lengths.at, lengths.at + lengths.length, table)
        table.seek(0)
        for table_slice in group:
            bounds = _place(
                np.array([table_slice.fragment] * 2),
                np.array([table_slice.first, table_slice.first + table_slice.rows]),
            )
            first, stop = np.searchsorted(place, bounds)
            mine = (place[first:stop] & np.uint64(0xFFFFFFFF)).astype(np.int64) - table_slice.first
            kept = np.ones(table_slice.rows, bool)
            kept[mine] = False
            rows = np.frombuffer(table.read(table_slice.rows * LENGTHS.itemsize), LENGTHS)
            sides = [
                _keep_side(rows[part], kept[part])
                for part in (slice(0, table_slice.train), slice(table_slice.train, table_slice.rows))
            ]
            slices.append((sides[0][0], sides[1][0]))
            for of_side, (_, kept_runs) in zip(runs, sides, strict=True):
                of_side.append(kept_runs.tobytes())
    return write_object(target, scratch, Kept(tuple(slices)), runs[0] + runs[1])


def _keep_side(rows: np.ndarray, kept: np.ndarray) -> tuple[KeptSide, np.ndarray]:
    """The counts of the rows that are kept, and their tokens as runs, RUN (n,)."""
    ends = np.cumsum(rows["tokens"], dtype=np.uint64)
    # where a run of kept rows begins and ends
    edges = np.flatnonzero(np.diff(np.concatenate(([False], kept, [False]))))
    places = np.concatenate((np.zeros(1, np.uint64), ends))[edges].reshape(-1, 2)
    runs = np.empty(len(places), RUN)
    runs["first"], runs["stop"] = places[:, 0], places[:, 1]
    return KeptSide(DocumentCounts.of(rows[kept]), int(ends[-1]) if len(ends) else 0, len(runs)), runs


def _place(fragment: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Fragment and row as one number that sorts in input order, uint64."""
    return fragment.astype(np.uint64) << np.uint64(32) | row.astype(np.uint64)
