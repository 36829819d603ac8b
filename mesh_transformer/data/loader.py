"""Batches of token sequences for training and validation, read ahead by a Grain thread.

Every host reads the whole stream and decodes only its own rows. The state of a loader is the position of the stream
(`stream.py`). Importing this module imports Grain and JAX.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grain
from grain.experimental import ThreadPrefetchIterDataset

from mesh_transformer.data.batching import Batching, Packing
from mesh_transformer.data.prepare import cached_records
from mesh_transformer.data.records import Record, RecordReader
from mesh_transformer.data.sources import find_source, is_text, record_files
from mesh_transformer.data.stream import Ordered, Shuffled, Stream, resume, stored_position
from mesh_transformer.data.text_counts import TextCounts, counts_of_cached, counts_of_index
from mesh_transformer.errors import UserError, plural
from mesh_transformer.sequences import Sequences

_log = logging.getLogger(__name__)


class Loader(Iterator[Sequences], Protocol):
    """An endless iterator of batches whose position can be stored."""

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch: JSON values, the same on every host."""

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which `get_state` returned `state`.

        Raises:
            UserError: the state is of another data set or another order.
        """

    def close(self) -> None:
        """Stop reading ahead and release the files."""


class Batches(Protocol):
    """Batches that can be read several times, each time from the first one.

    `counts` has the size of the whole set's text; None if its preparation has not counted it.
    """

    @property
    def counts(self) -> TextCounts | None: ...

    def __iter__(self) -> Loader: ...


def make_train_loader(
    source: str,
    *,
    seq: int,
    batch: int,
    rows: Sequence[int],
    accumulation: int = 1,
    shuffle: bool = False,
    shuffle_window: int = 16384,
    seed: int = 0,
    batch_across_files: bool = False,
    n_vocab: int | None = None,
    packing: Packing = "auto",
    tokenizer: str | None = None,
    prefetch: int = 2,
) -> Loader:
    """An endless iterator of training batches: `Sequences` (accumulation, rows, seq + 1).

    Args:
        source: an index file, a .tfrecords file or a .txt file; a path, gs:// or a name under data/.
        seq: tokens of a sequence; records hold one more.
        batch: sequences of one microbatch on all hosts.
        rows: the rows of 0..batch - 1 that this host takes, ascending.
        accumulation: microbatches of a step.
        shuffle: permute files and records by `seed` within `shuffle_window`; batches then span files.
        batch_across_files: without shuffling, fill a batch from the next file or epoch where a file ends.
        n_vocab: upper bound of tokens; None: not checked.
        packing: see `data.packing`.
        tokenizer: for .txt sources, see `load_tokenizer`.
        prefetch: steps read ahead.

    Raises:
        UserError: a file is missing, or its first record does not hold seq + 1 tokens. `next` raises it for
            a damaged record, and if a whole pass fills no batch.
    """
    path = find_source(source)
    files, shape = _open(path, Batching(seq, accumulation, batch, tuple(rows), n_vocab, packing), tokenizer)

    def begin() -> _BatchIterator:
        stream = Shuffled(files, shuffle_window, seed) if shuffle else Ordered(files, batch_across_files)
        return _BatchIterator(stream, shape, len(files), source)

    return iter(ThreadPrefetchIterDataset(StepSet(begin), prefetch_buffer_size=prefetch))


def make_val_loader(
    source: str,
    *,
    seq: int,
    batch: int,
    rows: Sequence[int],
    repeat: bool = True,
    n_vocab: int | None = None,
    packing: Packing = "auto",
    tokenizer: str | None = None,
    prefetch: int = 2,
) -> Batches:
    """Validation batches, `Sequences` (rows, seq + 1); each iteration starts with the first record.

    The records that fill no batch at the end of a file are dropped. Without `repeat` an iteration ends with the last
    file, otherwise never. Arguments and errors as in `make_train_loader`.
    """
    path = find_source(source)
    files, shape = _open(path, Batching(seq, 1, batch, tuple(rows), n_vocab, packing), tokenizer)
    counts = counts_of_cached(files[0]) if is_text(path) else counts_of_index(path)

    def begin() -> _BatchIterator:
        return _BatchIterator(Ordered(files, across_files=False), shape, len(files), source, repeat)

    batches = StepSet(begin).map(lambda microbatches: microbatches.map(lambda array: array[0]))
    return _Counted(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch), counts)


@dataclass(frozen=True)
class _Counted:
    """Batches and the size of their text."""

    batches: grain.IterDataset
    counts: TextCounts | None

    def __iter__(self) -> Loader:
        return iter(self.batches)


def files_of(path: str, shape: Batching, tokenizer: str | None) -> tuple[str, ...]:
    """The record files of a source: those of an index, or the cached one of a text."""
    if not is_text(path):
        return record_files(path)
    # one host warns
    return (cached_records(path, shape.seq, tokenizer, shape.n_vocab if shape.rows[0] == 0 else None),)


def _open(path: str, shape: Batching, tokenizer: str | None) -> tuple[tuple[str, ...], Batching]:
    """The record files of a source, and the form of its batches. Checks the first record."""
    files = files_of(path, shape, tokenizer)
    for file in files:
        with RecordReader(file) as reader:
            record = reader.read()
        if record is not None:
            return files, shape.fitted([record])
    raise UserError(f"{path}: no record in {plural(len(files), 'record file')}: make the data again")


class _BatchIterator(grain.DatasetIterator):
    """The batches of a stream."""

    def __init__(self, stream: Stream, shape: Batching, n_files: int, source: str, repeat: bool = True):
        super().__init__()
        self._stream, self._shape, self._n_files = stream, shape, n_files
        self._source, self._repeat = source, repeat
        self._first_epoch = stream.epoch
        # records left over at the end of each file since the last batch
        self._dropped: list[int] = []
        self._drop_logged, self._yielded_a_batch = False, False

    def __next__(self) -> Sequences:
        shape, rows = self._shape, frozenset(self._shape.rows)
        records: list[Record] = []
        filled = 0
        while filled < shape.records:
            mine = filled % shape.batch in rows
            record = self._stream.draw(mine)
            if record is None:
                self._drop(filled)
                records, filled = [], 0
                continue
            if mine:
                records.append(record)
            filled += 1
        self._dropped.clear()
        self._yielded_a_batch = True
        return shape.sequences(records)

    def get_state(self) -> dict[str, Any]:
        return stored_position(self._stream)

    def set_state(self, state: dict[str, Any]) -> None:
        resume(self._stream, state)
        self._dropped.clear()

    def close(self) -> None:
        super().close()
        self._stream.close()

    def _drop(self, records: int) -> None:
        """Note that a file ended with `records` that fill no step."""
        self._dropped.append(records)
        at_end = not self._repeat and self._stream.epoch > self._first_epoch
        if len(self._dropped) > self._n_files or (at_end and not self._yielded_a_batch):
            raise UserError(self._too_few())
        if records and not self._drop_logged:
            self._drop_logged = True
            _log.info(
                "%s: dropped the last %s of a file, because a step takes %d; later files are cut likewise",
                *(self._source, plural(records, "record"), self._shape.records),
            )
        if at_end:
            raise StopIteration

    def _too_few(self) -> str:
        s, training = self._shape, self._repeat
        return (
            f"{self._source}: a whole pass fills no batch: {plural(self._n_files, 'record file')}, the longest with "
            f"{plural(max(self._dropped), 'record')}, and a step takes {s.records} (batch {s.batch} x {s.accumulation} "
            f"microbatches) from one file: "
            + ("set data.batch_across_files, lower " if training else "lower ")
            + "the batch (data.per_replica_batch, optimizer.gradient_accumulation_steps, "
            "data.val_batch_multiplier) or add data"
        )


class StepSet(grain.IterDataset):
    """A Grain data set of steps (accumulation, rows, seq + 1). `make` begins an iterator."""

    def __init__(self, make: Callable[[], grain.DatasetIterator]):
        super().__init__()
        self._make = make

    def __iter__(self) -> grain.DatasetIterator:
        return self._make()
