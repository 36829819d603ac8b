"""Batches of token sequences for training and validation, read ahead by a Grain thread.

In the order of its files, every host reads the whole stream and decodes only its own rows; of a mixture, or of a set
that is shuffled as a whole, it reads only its own rows. The state of a loader is the position of its `StepReader`.
Importing this module imports Grain and JAX.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.data.batches.batching import Batching, Packing
from mesh_transformer.data.batches.mixture import Mixture
from mesh_transformer.data.batches.step_readers import MixtureReader, StepReader, StreamReader
from mesh_transformer.data.batches.stream import Ordered, Shuffled
from mesh_transformer.data.corpus.sequences import cached_records
from mesh_transformer.data.records.record_set import RecordSet
from mesh_transformer.data.records.sources import find_source, is_text, record_files
from mesh_transformer.data.records.text_counts import TextCounts, counts_of_cached, counts_of_index
from mesh_transformer.data.records.tfrecords import RecordReader
from mesh_transformer.errors import UserError, plural
from mesh_transformer.sequences import Sequences

# the name in the order and the position of a single set
SINGLE = "train"


class Loader(Iterator[Sequences], Protocol):
    """An iterator of batches whose position can be stored."""

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
    train_set: str | Mapping[str, TrainSource],
    *,
    seq: int,
    batch: int,
    rows: Sequence[int],
    accumulation: int = 1,
    shuffle: bool | Literal["whole"] = False,
    shuffle_window: int = 16384,
    seed: int = 0,
    batch_across_files: bool = False,
    n_vocab: int | None = None,
    packing: Packing = "auto",
    tokenizer: str | None = None,
    prefetch: int = 2,
) -> Loader:
    """An iterator of training batches: `Sequences` (accumulation, rows, seq + 1). It ends where a mixture ends.

    Args:
        train_set: an index file, a .tfrecords file or a .txt file; a path, gs:// or a name under data/. Or the sources
            of a mixture, whose batches have `Sequences.sources`.
        seq: tokens of a sequence; records hold one more.
        batch: sequences of one microbatch on all hosts.
        rows: the rows of 0..batch - 1 that this host takes, ascending.
        accumulation: microbatches of a step.
        shuffle: True: permute files and records by `seed` within `shuffle_window`; batches then span files. "whole":
            each pass over a source is a permutation of its records by `seed`. False: the order of the files.
        batch_across_files: with one set and without shuffling, fill a batch from the next file or epoch where a file
            ends.
        n_vocab: upper bound of tokens; None: not checked.
        packing: see `data.packing`.
        tokenizer: for .txt sources, see `load_tokenizer`.
        prefetch: steps read ahead.

    Raises:
        UserError: a file is missing, or the first record of a source does not hold seq + 1 tokens; or a file that is
            read at random is compressed or damaged. `next` raises it for a damaged record, and if a whole pass fills
            no batch.
    """
    shape = Batching(seq, accumulation, batch, tuple(rows), n_vocab, packing)
    if isinstance(train_set, str) and shuffle != "whole":
        source = train_set
        files, shape = _open_files(find_source(source), shape, tokenizer)

        def begin() -> _StepIterator:
            stream = Shuffled(files, shuffle_window, seed) if shuffle else Ordered(files, batch_across_files)
            return _StepIterator(StreamReader(stream, shape, len(files), source), shape)

        return iter(ThreadPrefetchIterDataset(_StepSet(begin), prefetch_buffer_size=prefetch))
    single = isinstance(train_set, str)
    sources = {SINGLE: TrainSource(set=train_set, weight={0: 1.0})} if isinstance(train_set, str) else dict(train_set)
    sets = {name: _open_set(sources[name].set, shape, tokenizer) for name in sorted(sources)}
    shape = shape.fitted([records.read([0])[0] for records in sets.values()])

    def begin_mixture() -> _StepIterator:
        sizes = {name: len(records) for name, records in sets.items()}
        mixture = Mixture(sources, sizes, seed if shuffle else None, shape.records)
        return _StepIterator(MixtureReader(mixture, sets, shape, single), shape)

    return iter(ThreadPrefetchIterDataset(_StepSet(begin_mixture), prefetch_buffer_size=prefetch))


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
    path = find_source(source, "val")
    files, shape = _open_files(path, Batching(seq, 1, batch, tuple(rows), n_vocab, packing), tokenizer)
    counts = counts_of_cached(files[0]) if is_text(path) else counts_of_index(path)

    def begin() -> _StepIterator:
        stream = Ordered(files, across_files=False)
        return _StepIterator(StreamReader(stream, shape, len(files), source, repeat), shape)

    batches = _StepSet(begin).map(lambda microbatches: microbatches.map(lambda array: array[0]))
    return _CountedBatches(ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch), counts)


@dataclass(frozen=True)
class _CountedBatches:
    """Batches and the size of their text."""

    batches: grain.IterDataset
    counts: TextCounts | None

    def __iter__(self) -> Loader:
        return iter(self.batches)


def _record_files(path: str, shape: Batching, tokenizer: str | None) -> tuple[str, ...]:
    """The record files of a source: the files that an index lists, or the cached file of a text."""
    if not is_text(path):
        return record_files(path)
    # one host warns
    return (cached_records(path, shape.seq, tokenizer, shape.n_vocab if shape.rows[0] == 0 else None),)


def _open_files(path: str, shape: Batching, tokenizer: str | None) -> tuple[tuple[str, ...], Batching]:
    """The record files of a source, and the form of its batches. Checks the first record."""
    files = _record_files(path, shape, tokenizer)
    for file in files:
        with RecordReader(file) as reader:
            record = reader.read()
        if record is not None:
            return files, shape.fitted([record])
    raise _no_record(path, len(files))


def _open_set(source: str, shape: Batching, tokenizer: str | None) -> RecordSet:
    """The records of a source, to be read from any place."""
    path = find_source(source)
    records = RecordSet(_record_files(path, shape, tokenizer))
    if not len(records):
        raise _no_record(path, len(records.files))
    return records


def _no_record(path: str, n_files: int) -> UserError:
    return UserError(f"{path}: no record in {plural(n_files, 'record file')}: make the data again")


class _StepIterator(grain.DatasetIterator):
    """The batches of a reader."""

    def __init__(self, reader: StepReader, shape: Batching):
        super().__init__()
        self._reader, self._shape = reader, shape

    def __next__(self) -> Sequences:
        step = self._reader.next_step()
        if step is None:
            raise StopIteration
        batch = self._shape.sequences(step.records)
        if step.sources is None:
            return batch
        sources = np.array(step.sources, np.int32)
        return batch._replace(sources=sources.reshape(self._shape.accumulation, len(self._shape.rows)))

    def get_state(self) -> dict[str, Any]:
        return self._reader.position()

    def set_state(self, state: dict[str, Any]) -> None:
        self._reader.go_to(state)

    def close(self) -> None:
        super().close()
        self._reader.close()


class _StepSet(grain.IterDataset):
    """A Grain data set of steps (accumulation, rows, seq + 1). `begin` makes an iterator."""

    def __init__(self, begin: Callable[[], grain.DatasetIterator]):
        super().__init__()
        self._begin = begin

    def __iter__(self) -> grain.DatasetIterator:
        return self._begin()
