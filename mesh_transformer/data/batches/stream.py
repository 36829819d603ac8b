"""The endless stream of records, in the order of the files or shuffled, with a position that can be stored.

A position is a small dict of numbers and strings. It counts records, not batches or hosts: it is the same on every host
and stays valid when the batch or the number of hosts changes. It includes stamps of the files that it depends on: the
current file and, with shuffling, all files of the half of the window that is drawn from.
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mesh_transformer.data.records.stamps import check_stamp, or_restart, stamp_of
from mesh_transformer.data.records.tfrecords import Record, RecordReader
from mesh_transformer.errors import UserError, plural

Position = dict[str, Any]

_PLACE = re.compile(r"[0-9]{1,9}")
_NUMBERS = ("epoch", "file", "record", "offset", "taken")

_log = logging.getLogger(__name__)


class Walk:
    """All records of all files, epoch after epoch. A `seed` permutes the files of each epoch."""

    order = "index"

    def __init__(self, files: Sequence[str], seed: int | None = None):
        self._files, self._seed = tuple(files), seed
        self._epoch, self._place = 0, 0
        self._reader: RecordReader | None = None
        self._stamp = ""
        self._empty_files_in_a_row = 0
        # the empty files that a warning has named
        self._warned: set[str] = set()

    @property
    def epoch(self) -> int:
        """Whole passes before the next record."""
        return self._epoch

    def read(self, keep: bool = True) -> Record | None:
        """The next record; None at the end of a file. The next call reads the next file.

        Raises:
            UserError: a file is damaged, or two passes found no record.
        """
        if self._reader is None:
            self._reader = self._open()
        record = self._reader.read(keep)
        if record is not None:
            self._empty_files_in_a_row = 0
            return record
        self._empty_files_in_a_row += 1
        if self._reader.number == 0 and self._path() not in self._warned:
            self._warned.add(self._path())
            _log.warning("%s has no records", self._path())
        # shuffled: all other files may come after a record in one epoch and before it in the next
        if self._empty_files_in_a_row >= 2 * len(self._files):
            raise UserError(f"there is no record in {_some(self._files)}: make the files again")
        self.close()
        self._place += 1
        if self._place == len(self._files):
            self._epoch, self._place = self._epoch + 1, 0
        return None

    def position(self) -> Position:
        """The position of the next record. `file`: its file in the epoch's order; `offset`: bytes; `files`: stamps."""
        number, offset = (self._reader.number, self._reader.offset) if self._reader else (0, 0)
        return {
            "epoch": self._epoch,
            "file": self._place,
            "name": os.path.basename(self._path()),
            "record": number,
            "offset": offset,
            "taken": 0,
            "files": self.stamps(),
        }

    def stamps(self) -> dict[str, str]:
        """The stamp of the open file by its place in the epoch's order; empty if no file is open."""
        return {str(self._place): self._stamp} if self._reader else {}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Continue at a stored position.

        Raises:
            UserError: the files have changed since the position was stored.
        """
        epoch, place = position["epoch"], position["file"]
        stamps = {int(at): stamp for at, stamp in position["files"].items()}
        if max([place, *stamps]) >= len(self._files) or os.path.basename(self._path(epoch, place)) != position["name"]:
            raise UserError(
                f"the stored data position is in {position['name']}, file {place + 1} of its data set, "
                f"which does not fit {_some(self._files)}: restore the former data set (same files, same order), "
                + or_restart()
            )
        for at, stamp in stamps.items():
            path = self._path(epoch, at)
            check_stamp(path, stamp_of(path), stamp)
        self.close()
        self._epoch, self._place, self._empty_files_in_a_row = epoch, place, 0
        if position["offset"]:
            self._reader = self._open(position["record"], position["offset"])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self, number: int = 0, offset: int = 0) -> RecordReader:
        self._stamp = stamp_of(self._path())
        return RecordReader(self._path(), number, offset)

    def _path(self, epoch: int | None = None, place: int | None = None) -> str:
        epoch = self._epoch if epoch is None else epoch
        place = self._place if place is None else place
        if self._seed is not None:
            place = int(np.random.default_rng([self._seed, epoch, 1]).permutation(len(self._files))[place])
        return self._files[place]


class Ordered(Walk):
    """Records in the order of the files. Without `across_files` a batch ends with its file."""

    def __init__(self, files: Sequence[str], across_files: bool):
        super().__init__(files)
        self._across = across_files

    def draw(self, keep: bool) -> Record | None:
        """The next record; None where a file ends and a batch must end with it. Without `keep` its data may be empty,
        because another host takes the record."""
        record = self.read(keep)
        while record is None and self._across:
            record = self.read(keep)
        return record


class Shuffled:
    """Records shuffled within a window, files shuffled within an epoch. Every epoch holds each record once.

    The window has two halves. Records are drawn from one half in random order. Each draw reads one record into the
    other half. A position is the start of the half that is drawn from, and the number of records drawn from it.
    """

    def __init__(self, files: Sequence[str], window: int, seed: int):
        self._walk, self._seed, self._half = Walk(files, seed), seed, max(1, window // 2)
        self.order = f"shuffle, seed {seed}, window {window}"
        self._begin(self._walk.position())

    @property
    def epoch(self) -> int:
        return int(self._start["epoch"])

    def draw(self, keep: bool) -> Record | None:
        """The next record. Its data is always there: `keep` has no effect."""
        if self._taken == len(self._current):
            self._swap_halves()
        at = self._order[self._taken]
        record = self._current[at]
        assert record is not None
        # frees its memory
        self._current[at] = None
        self._taken += 1
        self._fill_one()
        return record

    def position(self) -> Position:
        return {**self._start, "taken": self._taken}

    def go_to(self, position: Mapping[str, Any]) -> None:
        self._walk.go_to(position)
        self._begin(self._walk.position())
        if position["taken"]:
            self._swap_halves()
            self._taken = min(position["taken"], len(self._current))

    def close(self) -> None:
        self._walk.close()

    def _begin(self, start: Position, records: Sequence[Record] = ()) -> None:
        """Draw from `records`, which begin at `start`. The other half begins at the walk's position."""
        self._start, self._taken = start, 0
        self._current: list[Record | None] = list(records)
        seed = [self._seed, start["epoch"], start["file"], start["record"], 2]
        self._order = np.random.default_rng(seed).permutation(len(records))
        self._next: list[Record] = []
        self._next_start, self._next_full = self._walk.position(), False

    def _swap_halves(self) -> None:
        while not self._next_full:
            self._fill_one()
        self._begin(self._next_start, self._next)

    def _fill_one(self) -> None:
        """Read one record into the other half, which ends at its size or at the end of the epoch."""
        while not self._next_full:
            record = self._walk.read()
            if record is not None:
                self._next.append(record)
                self._next_start["files"].update(self._walk.stamps())
                self._next_full = len(self._next) == self._half
                return
            if self._walk.epoch != self._next_start["epoch"]:
                if self._next:
                    self._next_full = True
                else:
                    self._next_start = self._walk.position()


Stream = Ordered | Shuffled


def stored_position(stream: Stream) -> Position:
    """The position of the stream, with the version and the order that `resume` compares."""
    return {"version": 1, "order": stream.order, **stream.position()}


def resume(stream: Stream, position: Any) -> None:
    """Continue at a stored position.

    Raises:
        UserError: it has another form, or was stored for other files or another order.
    """
    if not isinstance(position, dict):
        raise UserError(f"the stored data position cannot be read: {position!r}"[:500])
    numeric = all(type(position.get(key)) is int and position[key] >= 0 for key in _NUMBERS)
    files = position.get("files")
    stamped = isinstance(files, dict) and all(
        _PLACE.fullmatch(at) and isinstance(stamp, str) for at, stamp in files.items()
    )
    named = isinstance(position.get("name"), str)
    # a later version has an order of its own
    if position.get("version") not in (1, 2) or position["version"] == 1 and not (numeric and named and stamped):
        raise UserError(f"the stored data position cannot be read: {position!r}"[:500])
    if position.get("order") != stream.order:
        raise UserError(
            f"the stored data position has the order '{position.get('order')}', this run has the order "
            f"'{stream.order}': set data.shuffle, data.seed and data.shuffle_window to their former values"
        )
    stream.go_to(position)


def _some(files: Sequence[str]) -> str:
    return ", ".join(files[:3]) + (f" and {plural(len(files) - 3, 'more file')}" if len(files) > 3 else "")
