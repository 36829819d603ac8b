"""The endless stream of records: the files in order or shuffled, with a position that can be stored.

A position is a small dict of plain numbers and strings. It counts records, never batches or hosts, so it is the
same on every host and holds after the batch or the number of hosts changed. With it go the stamps of the files that it
depends on: the one that is read, and under shuffle all those of the half that is drawn from.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mesh_transformer.data.records import Record, RecordReader
from mesh_transformer.errors import UserError
from mesh_transformer.files import read_range, size

Position = dict[str, Any]

_PLACE = re.compile(r"[0-9]{1,9}")
_NUMBERS = ("epoch", "file", "record", "offset", "taken")
_STAMPED_BYTES = 64 << 10


class Walk:
    """Record after record, file after file, epoch after epoch; `seed` permutes the files of each epoch."""

    order = "index"

    def __init__(self, files: Sequence[str], seed: int | None = None):
        self._files, self._seed = tuple(files), seed
        self._epoch, self._place = 0, 0
        self._reader: RecordReader | None = None
        self._stamp = ""
        self._empty_files_in_a_row = 0

    @property
    def epoch(self) -> int:
        """Whole passes behind the next record."""
        return self._epoch

    def read(self, keep: bool = True) -> Record | None:
        """The next record; None where a file ends, behind which the next file follows.

        Raises:
            UserError: a file is damaged, or two passes met no record.
        """
        if self._reader is None:
            self._reader = self._open()
        record = self._reader.read(keep)
        if record is not None:
            self._empty_files_in_a_row = 0
            return record
        self._empty_files_in_a_row += 1
        # shuffled, the other files may all lie behind a record in its epoch and before it in the next
        if self._empty_files_in_a_row >= 2 * len(self._files):
            raise UserError(f"there is no record in {_some(self._files)}: make the files again")
        self.close()
        self._place += 1
        if self._place == len(self._files):
            self._epoch, self._place = self._epoch + 1, 0
        return None

    def position(self) -> Position:
        """Where the next record lies. `file` is its place in the epoch's order, `offset` in bytes; `files` are stamps."""
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
        """The stamp of the file that is open, by its place in the epoch's order; none where no record of it was read."""
        return {str(self._place): self._stamp} if self._reader else {}

    def go_to(self, position: Mapping[str, Any]) -> None:
        """Continue at a stored position.

        Raises:
            UserError: the files are not those that the position was taken from.
        """
        epoch, place = position["epoch"], position["file"]
        # older positions have none
        stamps = {int(at): noted for at, noted in position.get("files", {}).items()}
        if (
            max([place, *stamps]) >= len(self._files)
            or os.path.basename(self._path(epoch, place)) != position["name"]
        ):
            raise UserError(
                f"the stored data position is in {position['name']}, number {place + 1} of its data set, "
                f"which does not fit {_some(self._files)}: bring back the former data set (same files, same order), "
                f"or read the data from its beginning with --set data.restart=true"
            )
        for at, noted in stamps.items():
            _check_stamp(self._path(epoch, at), noted)
        self.close()
        self._epoch, self._place, self._empty_files_in_a_row = epoch, place, 0
        if position["offset"]:
            self._reader = self._open(position["record"], position["offset"])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self, number: int = 0, offset: int = 0) -> RecordReader:
        self._stamp = _stamp(self._path())
        return RecordReader(self._path(), number, offset)

    def _path(self, epoch: int | None = None, place: int | None = None) -> str:
        epoch = self._epoch if epoch is None else epoch
        place = self._place if place is None else place
        if self._seed is not None:
            place = int(np.random.default_rng([self._seed, epoch, 1]).permutation(len(self._files))[place])
        return self._files[place]


class Ordered(Walk):
    """Records in the order of the files; batches end with a file unless `across_files`."""

    def __init__(self, files: Sequence[str], across_files: bool):
        super().__init__(files)
        self._across = across_files

    def draw(self, keep: bool) -> Record | None:
        """The next record; None where a batch must not go on (a file has ended). Without `keep` its data may be
        empty: another host takes it."""
        record = self.read(keep)
        while record is None and self._across:
            record = self.read(keep)
        return record


class Shuffled:
    """Records shuffled within a window, files shuffled within an epoch; every epoch holds each record once.

    The window has two halves: one is drawn from in random order while the other is filled, a record for a record.
    A position is the place where the half that is drawn from began, and how many were taken of it.
    """

    def __init__(self, files: Sequence[str], window: int, seed: int):
        self._walk, self._seed, self._half = Walk(files, seed), seed, max(1, window // 2)
        self.order = f"shuffle, seed {seed}, window {window}"
        self._begin(self._walk.position())

    @property
    def epoch(self) -> int:
        return int(self._start["epoch"])

    def draw(self, keep: bool) -> Record | None:
        """The next record; its data is there without `keep` too."""
        if self._taken == len(self._current):
            self._turn()
        at = self._order[self._taken]
        record = self._current[at]
        assert record is not None
        self._current[at] = None  # give the memory back
        self._taken += 1
        self._fill_one()
        return record

    def position(self) -> Position:
        return {**self._start, "taken": self._taken}

    def go_to(self, position: Mapping[str, Any]) -> None:
        self._walk.go_to(position)
        self._begin(self._walk.position())
        if position["taken"]:
            self._turn()
            self._taken = min(position["taken"], len(self._current))

    def close(self) -> None:
        self._walk.close()

    def _begin(self, start: Position, records: Sequence[Record] = ()) -> None:
        """Draw from `records`, which begin at `start`; the other half begins where the walk is."""
        self._start, self._taken = start, 0
        self._current: list[Record | None] = list(records)
        seed = [self._seed, start["epoch"], start["file"], start["record"], 2]
        self._order = np.random.default_rng(seed).permutation(len(records))
        self._next: list[Record] = []
        self._next_start, self._next_full = self._walk.position(), False

    def _turn(self) -> None:
        while not self._next_full:
            self._fill_one()
        self._begin(self._next_start, self._next)

    def _fill_one(self) -> None:
        """Read one record into the half that is filled; it is full at its size or at the end of the epoch."""
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


Stream = Ordered | Shuffled  # what batches are made of


def stored_position(stream: Stream) -> Position:
    """Where the stream is, with what tells whether another stream can go there."""
    return {"version": 1, "order": stream.order, **stream.position()}


def resume(stream: Stream, position: Mapping[str, Any]) -> None:
    """Continue at a stored position.

    Raises:
        UserError: it is none, or was taken from other files or in another order.
    """
    whole = all(type(position.get(key)) is int and position[key] >= 0 for key in _NUMBERS)
    files = position.get("files", {})
    stamped = isinstance(files, dict) and all(
        _PLACE.fullmatch(at) and isinstance(noted, str) for at, noted in files.items()
    )
    named = isinstance(position.get("name"), str)
    if position.get("version") != 1 or not (whole and named and stamped):
        raise UserError(f"the stored data position cannot be read: {dict(position)!r}"[:500])
    if position.get("order") != stream.order:
        raise UserError(
            f"the stored data position was taken with the order '{position.get('order')}', this run asks for "
            f"'{stream.order}': set data.shuffle, data.seed and data.shuffle_window as they were"
        )
    stream.go_to(position)


def _some(files: Sequence[str]) -> str:
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")


def _stamp(path: str) -> str:
    """The size of a file (local or `gs://`) and a hash of its beginning: they tell it from another that has taken its name.

    Raises:
        UserError: there is no such file.
    """
    head = hashlib.sha256(read_range(path, 0, _STAMPED_BYTES)).hexdigest()
    return f"{size(path)} bytes, sha256 of the first 64 KiB {head[:16]}..."


def _check_stamp(path: str, noted: str) -> None:
    """
    Raises:
        UserError: the file is missing, or not the one whose stamp was noted with a data position.
    """
    found = _stamp(path)
    if found != noted:
        raise UserError(
            f"{path} has changed since the data position was stored (then: {noted}; now: {found}): bring back the "
            f"former file, or read the data from its beginning with --set data.restart=true"
        )
