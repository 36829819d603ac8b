"""What a format of input files is."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, NamedTuple

from mesh_transformer.data.corpus import Piece
from mesh_transformer.errors import BadDataError


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


Item = Piece | Bad
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
    ranges: Callable[[str, int, int, str], list[Range]]
    pieces: Callable[[str, int, Range, str], Iterator[Item]]


@dataclass(frozen=True)
class Format:
    """A format of input files.

    Args:
        suffix: how the names of its files end, before the suffix of a compression.
        stream: the documents of an open file that is read from start to end, from the file, its name for messages and
            the column. It raises BadDataError where nothing after the damage can be read. None: the format needs a file
            that can seek, so that it is neither compressed nor in an archive.
        cut: how a file that is not compressed is read in ranges. None: it is one part.
        check: raises UserError if the open file has no such column; it reads only the beginning. None: it cannot be
            seen there.
    """

    suffix: str
    stream: Callable[[IO[bytes], str, str], Iterator[Item]] | None
    cut: Cut | None = None
    check: Callable[[IO[bytes], str, str], None] | None = None
