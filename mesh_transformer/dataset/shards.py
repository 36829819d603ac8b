"""The last task: records. A shard is a range of the tokens of its side, across fragments."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, repeat
from typing import NamedTuple

import numpy as np

from mesh_transformer.data.records.tfrecords import write_record
from mesh_transformer.dataset.counts import ROW
from mesh_transformer.dataset.duplicates import RUN, Range
from mesh_transformer.dataset.fragment import Fragment
from mesh_transformer.dataset.objects import atomic_file, spool, write_object
from mesh_transformer.errors import RunError
from mesh_transformer.files import Writable, copy_range, read_range
from mesh_transformer.sequences import Example

# of a record file and of its index: each record's offset, as a little-endian number of 8 bytes
RECORDS, OFFSETS = ".tfrecords", ".tfrecords.offsets"


class Source(NamedTuple):
    """Consecutive tokens of one side of a fragment, or of a slice of it.

    Args:
        path: the fragment.
        at: where they begin in the object.
        tokens: the number of kept tokens.
        table: the rows of their documents (ROW), including duplicates.
        runs: where the runs of kept tokens are (RUN, from `at` on). None: no token is dropped.
    """

    path: str
    at: int
    tokens: int
    table: Range
    runs: Range | None = None


class Taken(NamedTuple):
    """Tokens `first` to `stop` of a source, duplicates not counted."""

    source: Source
    first: int
    stop: int


@dataclass(frozen=True)
class Shard:
    """A record file.

    Args:
        bytes: its size.
        sha256: of its content.
        padding: tokens after the last document of a record.
        learned: tokens that the loss counts; 0 without loss masks.
    """

    records: int
    bytes: int
    sha256: str
    padding: int = 0
    learned: int = 0
    at: int = 0


def source_of(path: str, fragment: Fragment, side: int) -> Source:
    """All tokens of a side of a fragment."""
    counts = fragment.sides[side]
    table = Range(path, fragment.tables_at[side], counts.documents * ROW.itemsize)
    return Source(path, fragment.tokens_at[side], counts.tokens, table)


def cuts(tokens: int, length: int, most: int) -> list[int]:
    """The tokens at which the shards of a side begin, and where the last one ends: shards are even to one record.

    Args:
        tokens: of the side.
        length: of a record.
        most: tokens of a shard.
    """
    records = tokens // length
    shards = -(-records // (most // length))
    return [records * i // shards * length for i in range(shards + 1)] if shards else [0]


def taken(sources: Sequence[Source], bounds: Sequence[int]) -> list[list[Taken]]:
    """For each range of tokens `bounds[i]` to `bounds[i + 1]`, the parts of the sources that hold it."""
    ends = list(accumulate(source.tokens for source in sources))
    shards = []
    for first, stop in zip(bounds, bounds[1:], strict=False):
        shard, at, number = [], first, bisect_right(ends, first)
        while at < stop:
            begin = ends[number] - sources[number].tokens
            end = min(stop, ends[number])
            if end > at:
                shard.append(Taken(sources[number], at - begin, end - begin))
            at, number = end, number + 1
        shards.append(shard)
    return shards


def write_shard(target: str, scratch: str, result: str, taken: Sequence[Taken], length: int, width: int) -> Shard:
    """Write a shard whose records are the tokens in order, cut at each record.

    Args:
        target: path of the record file, without its suffix.
        result: path of the object with the result.
        length: tokens of a record.
        width: bytes of a token in fragments.
    """
    with spool(scratch) as tokens:
        for span, runs in zip(taken, runs_of(taken), strict=True):
            copy_taken(span, runs, width, tokens)
        tokens.seek(0)
        blocks = iter(lambda: tokens.read(length * width), b"")
        records = (Example(np.frombuffer(block, f"<u{width}")) for block in blocks)
        return write_examples(target, scratch, result, records)


def write_examples(target: str, scratch: str, result: str, examples: Iterable[Example]) -> Shard:
    """Write examples as the records of a shard, its offsets and its result. The records appear last."""
    offsets, padding, learned = [], 0, 0
    with atomic_file(target + RECORDS, scratch) as file:
        for example in examples:
            offsets.append(file.tell())
            write_record(file, *example)
            if example.documents is not None:
                padding += len(example.tokens) - int(example.documents.sum())
            if example.loss is not None:
                learned += int(example.loss[1::2].sum())
        size = file.tell()
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
        with atomic_file(target + OFFSETS, scratch) as index:
            index.write(np.array(offsets, "<u8").tobytes())
        return write_object(result, scratch, Shard(len(offsets), size, digest, padding, learned), [])


def runs_of(taken: Sequence[Taken]) -> Iterator[np.ndarray | None]:
    """The runs of each source, RUN (n,). Consecutive runs in one object are read at once."""
    for path, spans in groupby(taken, lambda span: None if span.source.runs is None else span.source.runs.path):
        sources = [span.source.runs for span in spans]
        ranges = [runs for runs in sources if runs is not None]
        if path is None:
            yield from repeat(None, len(sources))
            continue
        first, stop = ranges[0].at, ranges[-1].at + ranges[-1].length
        data = read_range(path, first, stop - first)
        for runs in ranges:
            yield np.frombuffer(data, RUN, runs.length // RUN.itemsize, runs.at - first)


def copy_taken(span: Taken, runs: np.ndarray | None, width: int, target: Writable) -> None:
    """Append tokens to a file. It reads one range of the fragment.

    Raises:
        RunError: the fragment ends before.
    """
    source = span.source
    if runs is None:
        pairs = np.array([[span.first, span.stop]])
    else:
        pairs = np.stack((runs["first"], runs["stop"]), axis=1).astype(np.int64)
        # where each run ends among the kept tokens
        ends = np.cumsum(pairs[:, 1] - pairs[:, 0])
        begins = ends - (pairs[:, 1] - pairs[:, 0])
        pairs[:, 0] += np.maximum(span.first - begins, 0)
        pairs[:, 1] -= np.maximum(ends - span.stop, 0)
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    first, stop = int(pairs[0, 0]), int(pairs[-1, 1])
    sieve = Sieve(((pairs - first) * width).tolist(), target)
    copy_range(source.path, source.at + first * width, source.at + stop * width, sieve)
    if sieve.taken != (stop - first) * width:
        raise RunError(f"{source.path} is damaged: delete its folder, and give the same command again")


class Sieve:
    """Passes the bytes of some ranges on to `target`. `taken` counts all bytes.

    Args:
        ranges: first byte and stop of each range, in order.
    """

    def __init__(self, ranges: Sequence[tuple[int, int]], target: Writable):
        self._ranges, self._target, self._number = ranges, target, 0
        self.taken = 0

    def write(self, block: bytes, /) -> int:
        """Take the next bytes."""
        view, begin, end = memoryview(block), self.taken, self.taken + len(block)
        self.taken = end
        while self._number < len(self._ranges):
            first, stop = self._ranges[self._number]
            if first < end:
                self._target.write(bytes(view[max(first - begin, 0) : stop - begin]))
            if stop > end:
                break
            self._number += 1
        return len(block)
