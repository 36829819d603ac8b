"""Reads the records of a run, step by step: in the order of files, or in the order of a mixture."""

import logging
import os
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

from mesh_transformer.data.batches.batching import Batching
from mesh_transformer.data.batches.mixture import Draw, Mixture
from mesh_transformer.data.batches.stream import Stream, resume, stored_position
from mesh_transformer.data.records.record_set import RecordSet
from mesh_transformer.data.records.stamps import check_stamp, or_restart
from mesh_transformer.data.records.tfrecords import Record
from mesh_transformer.errors import UserError, plural

_log = logging.getLogger(__name__)


class HostRecords(NamedTuple):
    """The records of a step that this host takes, in the order of microbatches and rows.

    Args:
        sources: the place of each record's source among the sorted names; None: the set has no sources.
    """

    records: list[Record]
    sources: list[int] | None = None


class StepReader(Protocol):
    """The records of a run, with a position that can be stored."""

    def next_step(self) -> HostRecords | None:
        """The records of the next step; None at the end of the data.

        Raises:
            UserError: a record is damaged, or the data fills no step.
        """

    def position(self) -> dict[str, Any]:
        """The position after the last step: JSON values, the same on every host."""

    def go_to(self, position: Any) -> None:
        """Continue at a stored position.

        Raises:
            UserError: it is of another data set or another order.
        """

    def close(self) -> None:
        """Release the files."""


class StreamReader:
    """The records of a stream of files (`stream.py`). Records at the end of a file that fill no step are dropped,
    unless the stream spans files.

    Args:
        n_files: of the stream.
        source: the name of the data set, for messages.
        repeat: whether another pass follows a pass.
    """

    def __init__(self, stream: Stream, shape: Batching, n_files: int, source: str, repeat: bool = True):
        self._stream, self._shape, self._n_files = stream, shape, n_files
        self._source, self._repeat = source, repeat
        self._first_epoch = stream.epoch
        # records left over at the end of each file since the last step
        self._dropped: list[int] = []
        self._drop_logged, self._filled_a_step = False, False

    def next_step(self) -> HostRecords | None:
        """See `StepReader`."""
        shape, rows = self._shape, frozenset(self._shape.rows)
        records: list[Record] = []
        filled = 0
        while filled < shape.records:
            is_ours = filled % shape.batch in rows
            record = self._stream.draw(is_ours)
            if record is None:
                if self._ends(filled):
                    return None
                records, filled = [], 0
                continue
            if is_ours:
                records.append(record)
            filled += 1
        self._dropped.clear()
        self._filled_a_step = True
        return HostRecords(records)

    def position(self) -> dict[str, Any]:
        """See `StepReader`."""
        return stored_position(self._stream)

    def go_to(self, position: Any) -> None:
        """See `StepReader`."""
        resume(self._stream, position)
        self._dropped.clear()

    def close(self) -> None:
        """See `StepReader`."""
        self._stream.close()

    def _ends(self, left: int) -> bool:
        """Whether the data ends with a file whose last `left` records fill no step."""
        self._dropped.append(left)
        at_end = not self._repeat and self._stream.epoch > self._first_epoch
        if len(self._dropped) > self._n_files or (at_end and not self._filled_a_step):
            raise UserError(self._too_few())
        if left and not self._drop_logged:
            self._drop_logged = True
            _log.info(
                "%s: dropped the last %s of a file, because a step takes %d; later files are cut likewise",
                *(self._source, plural(left, "record"), self._shape.records),
            )
        return at_end

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


class MixtureReader:
    """The records that a mixture draws, each from its place in a file. Positions have the stamp of each file.

    Args:
        sets: the records of each source, sorted by name as in `Mixture.names`.
        single: whether the only source is the whole set, so that records need not name it.
    """

    def __init__(self, mixture: Mixture, sets: Mapping[str, RecordSet], shape: Batching, single: bool):
        self._mixture, self._sets, self._shape, self._single = mixture, sets, shape, single
        self._stamps = {
            name: [[os.path.basename(file.path), file.stamp] for file in records.files]
            for name, records in sets.items()
        }

    def next_step(self) -> HostRecords | None:
        """See `StepReader`."""
        shape, mixture = self._shape, self._mixture
        draws = mixture.next_step()
        if draws is None and mixture.step == 0:
            raise UserError(
                f"data.train_set fills no step of {shape.records} records: {mixture.end}: raise it, lower the "
                "batch, or add data"
            )
        if draws is None:
            if shape.rows[0] == 0:
                # one host says it
                _log.info("data.train_set ends before step %d: %s", mixture.step + 1, mixture.end)
            return None
        rows = frozenset(shape.rows)
        ours = [draw for place, draw in enumerate(draws) if place % shape.batch in rows]
        records: dict[Draw, Record] = {}
        # the records of one source are read together
        for source, record_set in enumerate(self._sets.values()):
            drawn = [draw for draw in ours if draw.source == source]
            records.update(zip(drawn, record_set.read([mixture.record(draw) for draw in drawn]), strict=True))
        sources = None if self._single else [draw.source for draw in ours]
        return HostRecords([records[draw] for draw in ours], sources)

    def position(self) -> dict[str, Any]:
        """See `StepReader`."""
        return {**self._mixture.position(), "files": self._stamps}

    def go_to(self, position: Any) -> None:
        """See `StepReader`."""
        self._mixture.go_to(position)
        stored = position.get("files")
        if stored is not None:
            for name, records in self._sets.items():
                _check_files(name, records, stored.get(name) if isinstance(stored, dict) else stored)

    def close(self) -> None:
        """See `StepReader`."""
        for records in self._sets.values():
            records.close()


def _check_files(name: str, records: RecordSet, stored: Any) -> None:
    """Compare the files of a source with the files of a stored position.

    Raises:
        UserError: a file has changed, or the list of files differs.
    """
    if not isinstance(stored, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in stored):
        raise UserError(f"the stored data position has no files of the source {name}: {stored!r}"[:500])
    for number, (file, pair) in enumerate(zip_longest(records.files, stored), 1):
        now, then = os.path.basename(file.path) if file else "none", pair[0] if pair else "none"
        if now != then:
            raise UserError(
                f"the source {name} has changed since the data position was stored: its file {number} was {then}, and "
                f"is {now}: restore the former files in their former order, {or_restart()}"
            )
        check_stamp(file.path, file.stamp, pair[1])
