"""Comma-separated values with a header, read by Python's csv: a document a row."""

import csv
from collections.abc import Iterator
from typing import IO

from mesh_transformer.data.corpus.formats.base import Bad, Column, InputFormat, Item, Row, check_columns
from mesh_transformer.data.corpus.pieces import cut
from mesh_transformer.errors import BadDataError

# of a row; csv holds four bytes for each character of a field
MAX_ROW_BYTES = 1 << 24
# of a row: a field is at least a pointer in memory, and a comma in a text counts too
_MAX_COMMAS = 1 << 22
_STEP_BYTES = 1 << 20


def stream(file: IO[bytes], place: str, column: Column) -> Iterator[Item]:
    """The text of each row in `column`, or the example of each row. An empty line is no row.

    Raises:
        BadDataError: the header is damaged or has no such columns.
    """
    rows = _Rows(file, place)
    header = _header(rows, place, column)
    if header is None:
        return
    index = 0 if column is None else header.index(column)
    while True:
        try:
            row = rows.next()
        except _RowError as error:
            yield Bad.of(error)
            continue
        if row is None:
            return
        if row and len(row) != len(header):
            reason = f"{len(row)} fields, not {len(header)} as in the header: correct the row"
            yield Bad.of(BadDataError(rows.where, "wrong number of fields", reason))
        elif row and column is None:
            yield Row.of(dict(zip(header, row, strict=True)), rows.where)
        elif row:
            yield from cut([row[index]], None)


def check(file: IO[bytes], place: str, column: Column) -> None:
    """Raises BadDataError if the header is damaged or has no such columns."""
    _header(_Rows(file, place), place, column)


def _header(rows: "_Rows", place: str, column: Column) -> list[str] | None:
    """The names of the columns; None for an empty file."""
    header = rows.next()
    if header is None:
        return None
    check_columns(header, place, column, "the header has ")
    return header


class _RowError(BadDataError):
    """A row that cannot be read. The next row begins at the next line."""


class _Rows:
    """The rows of a file, and the line at which the last one begins."""

    def __init__(self, file: IO[bytes], place: str):
        self._file, self._place = file, place
        self._line, self._bytes, self._commas = 0, 0, 0
        # a limit of the whole process; `__next__` bounds the row
        csv.field_size_limit(max(csv.field_size_limit(), MAX_ROW_BYTES))
        self._reader = csv.reader(self, strict=True)
        self.where = place

    def next(self) -> list[str] | None:
        """The next row; None at the end of the file. An empty line gives an empty row.

        Raises:
            BadDataError: the row, or the rest of the file, cannot be read.
        """
        self.where = f"{self._place}, row at line {self._line + 1:,}"
        self._bytes = self._commas = 0
        try:
            return next(self._reader, None)
        except csv.Error as error:
            reason = f"not CSV ({error}): a quote within a quoted field is written twice"
            raise _RowError(self.where, "not CSV", reason) from error

    def __iter__(self) -> "_Rows":
        return self

    def __next__(self) -> str:
        """The next line, for the reader. After an error the reader begins a row."""
        line = self._file.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self._line += 1
        self._bytes += len(line)
        self._commas += line.count(b",")
        if self._bytes > MAX_ROW_BYTES or self._commas > _MAX_COMMAS:
            while not line.endswith(b"\n") and (more := self._file.readline(_STEP_BYTES)):
                line = more
            reason = (
                f"a row of more than {MAX_ROW_BYTES} bytes or {_MAX_COMMAS} commas: split it into documents, "
                "or look for a quote that is not closed"
            )
            raise _RowError(self.where, "row too long", reason)
        try:
            return line.decode("utf-8-sig" if self._line == 1 else "utf-8")
        except UnicodeDecodeError as error:
            reason = f"not UTF-8 text ({error.reason}): convert the file to UTF-8"
            raise _RowError(self.where, "not UTF-8", reason) from error


FORMAT = InputFormat(".csv", stream, check=check)
