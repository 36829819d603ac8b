"""Training batches of a mixture, or of one set that is shuffled as a whole. Each host reads only its own rows.

Importing this module imports Grain and JAX.
"""

import logging
import os
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import grain
import numpy as np
from grain.experimental import ThreadPrefetchIterDataset

from mesh_transformer.config.mixture import TrainSource
from mesh_transformer.data.batching import Batching, Packing
from mesh_transformer.data.loader import Loader, StepSet, files_of
from mesh_transformer.data.mixture import Draw, Mixture
from mesh_transformer.data.record_set import RecordSet
from mesh_transformer.data.records import Record
from mesh_transformer.data.sources import find_source
from mesh_transformer.data.stamps import RESTART, check_stamp
from mesh_transformer.errors import UserError, plural
from mesh_transformer.sequences import Sequences

# the name in the order and the position of a single set
SINGLE = "train"

_log = logging.getLogger(__name__)


def make_mixture_loader(
    train_set: str | Mapping[str, TrainSource],
    *,
    seq: int,
    batch: int,
    rows: Sequence[int],
    accumulation: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    n_vocab: int | None = None,
    packing: Packing = "auto",
    tokenizer: str | None = None,
    prefetch: int = 2,
) -> Loader:
    """An iterator of training batches: `Sequences` (accumulation, rows, seq + 1). It ends where the data ends.

    Args:
        train_set: the sources of a mixture, whose batches have `Sequences.sources`; or one set.
        shuffle: each pass over a source is a permutation of its records by `seed`. False: in the order of its files.
        seq, batch, rows, accumulation, n_vocab, packing, tokenizer, prefetch: as in `make_train_loader`.

    Raises:
        UserError: a file is missing, compressed or damaged, or the first record of a source does not hold seq + 1
            tokens. `next` raises it for a damaged record.
    """
    single = isinstance(train_set, str)
    sources = {SINGLE: TrainSource(set=train_set, weight={0: 1.0})} if isinstance(train_set, str) else dict(train_set)
    shape = Batching(seq, accumulation, batch, tuple(rows), n_vocab, packing)
    sets = {name: _open(sources[name].set, shape, tokenizer) for name in sorted(sources)}
    shape = shape.fitted([records.read([0])[0] for records in sets.values()])

    def begin() -> _MixtureIterator:
        sizes = {name: len(records) for name, records in sets.items()}
        mixture = Mixture(sources, sizes, seed if shuffle else None, shape.records)
        return _MixtureIterator(mixture, list(sets.values()), shape, mixed=not single)

    batches = iter(ThreadPrefetchIterDataset(StepSet(begin), prefetch_buffer_size=prefetch))
    return _Stamped(batches, sets)


def _open(source: str, shape: Batching, tokenizer: str | None) -> RecordSet:
    path = find_source(source)
    records = RecordSet(files_of(path, shape, tokenizer))
    if not len(records):
        raise UserError(f"{path}: no record in {plural(len(records.files), 'record file')}: make the data again")
    return records


class _Stamped(Loader):
    """A loader whose positions also have the name and the stamp of each file of each source."""

    def __init__(self, batches: Loader, sets: Mapping[str, RecordSet]):
        self._batches, self._sets = batches, sets
        self._stamps = {
            name: [[os.path.basename(file.path), file.stamp] for file in records.files]
            for name, records in sets.items()
        }

    def __next__(self) -> Sequences:
        return next(self._batches)

    def get_state(self) -> dict[str, Any]:
        return {**self._batches.get_state(), "files": self._stamps}

    def set_state(self, state: dict[str, Any]) -> None:
        self._batches.set_state(state)
        stored = state.get("files")
        if stored is not None:
            for name, records in self._sets.items():
                _check_files(name, records, stored.get(name))

    def close(self) -> None:
        self._batches.close()
        for records in self._sets.values():
            records.close()


def _check_files(name: str, records: RecordSet, stored: Any) -> None:
    """Compare the files of a source with those of a stored position.

    Raises:
        UserError: a file has changed, or the source has others.
    """
    if not isinstance(stored, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in stored):
        raise UserError(f"the stored data position has no files of the source {name}: {stored!r}"[:500])
    for number, (file, pair) in enumerate(zip_longest(records.files, stored), 1):
        now, then = os.path.basename(file.path) if file else "none", pair[0] if pair else "none"
        if now != then:
            raise UserError(
                f"the source {name} has changed since the data position was stored: its file {number} was {then}, and "
                f"is {now}: restore the former files in their former order, {RESTART}"
            )
        check_stamp(file.path, file.stamp, pair[1])


class _MixtureIterator(grain.DatasetIterator):
    """The batches of a mixture.

    Args:
        sets: the records of the sources, in the order of `Mixture.names`.
        mixed: whether the batches name the source of each sequence.
    """

    def __init__(self, mixture: Mixture, sets: Sequence[RecordSet], shape: Batching, mixed: bool):
        super().__init__()
        self._mixture, self._sets, self._shape, self._mixed = mixture, sets, shape, mixed

    def __next__(self) -> Sequences:
        shape, rows = self._shape, frozenset(self._shape.rows)
        draws = self._mixture.next_step()
        if draws is None and self._mixture.step == 0:
            raise UserError(
                f"data.train_set fills no step of {shape.records} records: {self._mixture.end}: raise it, lower the "
                "batch, or add data"
            )
        if draws is None:
            if 0 in rows:
                # one host says it
                _log.info("data.train_set ends before step %d: %s", self._mixture.step + 1, self._mixture.end)
            raise StopIteration
        mine = [draw for place, draw in enumerate(draws) if place % shape.batch in rows]
        batch = shape.sequences(self._read(mine))
        if not self._mixed:
            return batch
        sources = np.array([draw.source for draw in mine], np.int32)
        return batch._replace(sources=sources.reshape(shape.accumulation, len(rows)))

    def get_state(self) -> dict[str, Any]:
        return self._mixture.position()

    def set_state(self, state: dict[str, Any]) -> None:
        self._mixture.go_to(state)

    def _read(self, draws: Sequence[Draw]) -> list[Record]:
        """The drawn records. Those of one source are read together."""
        found: dict[Draw, Record] = {}
        for place, records in enumerate(self._sets):
            own = [draw for draw in draws if draw.source == place]
            found.update(zip(own, records.read([self._mixture.record(draw) for draw in own]), strict=True))
        return [found[draw] for draw in draws]
