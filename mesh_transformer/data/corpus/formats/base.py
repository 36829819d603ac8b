"""The interface of a format of input files."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from mesh_transformer.data.chat.instructions import example_of, fields_of, forms
from mesh_transformer.data.corpus.pieces import TextPiece
from mesh_transformer.errors import BadDataError, UserError, listed


class Bad(NamedTuple):
    """A place of an input that is not a document. The document that is open at this place is dropped.

    Args:
        place: the file, and the byte, line or row in it.
        kind: a short reason, by which such places are counted.
        message: the whole sentence for a user: what was given, what is allowed, what to change.
    """

    place: str
    kind: str
    message: str

    @classmethod
    def of(cls, error: BadDataError) -> "Bad":
        """The same from an error."""
        return cls(error.place, error.kind, str(error))


class Row(NamedTuple):
    """An example of instruction data.

    Args:
        place: the file, and the byte, line or row in it.
        example: its fields (`data/chat/instructions.py`).
    """

    place: str
    example: dict[str, Any]

    @classmethod
    def of(cls, value: Any, place: str) -> "Row | Bad":
        """The example in an object of JSON or in the row of a table; or why there is none."""
        try:
            return cls(place, example_of(value))
        except UserError as error:
            return Bad.of(BadDataError(place, "not an example", str(error)))


def check_columns(names: Sequence[str], place: str, column: "Column", has: str = "") -> list[str]:
    """The columns that are read, of the columns `names` of a file.

    Args:
        has: the beginning of the message, such as "the header has ".

    Raises:
        BadDataError: the file has no such column, or several of one name.
    """
    wanted = fields_of(names) if column is None else [column]
    shown = listed([repr(name[:100]) for name in names])
    if not wanted:
        reason = f"{has}no columns of an example, it has {shown}: rename them to {forms()}"
        raise BadDataError(place, "no column", reason)
    for name in wanted:
        if names.count(name) != 1:
            many = "several columns" if name in names else "no column"
            out = "choose one with --column" if column is not None else "give each column a name of its own"
            raise BadDataError(place, "no column", f"{has}{many} {name!r}, it has {shown}: {out}")
    return wanted


Item = TextPiece | Row | Bad
# the name of the column with the text; None: each row is an example of instruction data, a `Row`
Column = str | None
# first and stop, exclusive
Range = tuple[int, int]


@dataclass(frozen=True)
class Cut:
    """How a file is read in ranges.

    Args:
        unit: what the ends of a range count, in the plural.
        ranges: the ranges of a file, from its path, its size in bytes, the bytes of a part and the column. Raises
            UserError if the file has no such column.
        pieces: the documents of a range, from the path, its size in bytes, the range and the column.
    """

    unit: str
    ranges: Callable[[str, int, int, Column], list[Range]]
    pieces: Callable[[str, int, Range, Column], Iterator[Item]]


@dataclass(frozen=True)
class InputFormat:
    """A format of input files.

    Args:
        suffix: how the names of its files end, before the suffix of a compression.
        stream: the documents of an open file that is read from start to end, from the file, its name for messages and
            the column. It raises BadDataError where nothing after the damage can be read. None: the format needs a file
            that can seek, so that it is neither compressed nor in an archive.
        cut: how a file that is not compressed is read in ranges. None: it is one part.
        check: raises UserError if the open file has no such column; it reads only the beginning. None: the beginning
            does not show the columns.
    """

    suffix: str
    stream: Callable[[IO[bytes], str, Column], Iterator[Item]] | None
    cut: Cut | None = None
    check: Callable[[IO[bytes], str, Column], None] | None = None
