"""Plain text in UTF-8: a file is one document."""

from collections.abc import Iterator
from typing import IO

from mesh_transformer.data.corpus.formats.base import Column, InputFormat, Item
from mesh_transformer.data.corpus.pieces import cut, text_blocks
from mesh_transformer.errors import BadDataError


def stream(file: IO[bytes], place: str, column: Column) -> Iterator[Item]:
    """The text without a byte-order mark; every end of a line is a line feed.

    Raises:
        BadDataError: examples are wanted.
    """
    check(file, place, column)
    return cut(_blocks(file, place), None)


def check(file: IO[bytes], place: str, column: Column) -> None:
    """Raises BadDataError if examples are wanted."""
    if column is None:
        reason = "plain text has no examples: give .jsonl, .csv or .parquet files, or leave --instructions out"
        raise BadDataError(place, "not an example", reason)


def _blocks(file: IO[bytes], place: str) -> Iterator[str]:
    begun = False
    for block in text_blocks(file, place, translate=True):
        yield block if begun else block.removeprefix("\ufeff")
        # an empty block may stand before the first character
        begun = begun or block != ""


FORMAT = InputFormat(".txt", stream, check=check)
