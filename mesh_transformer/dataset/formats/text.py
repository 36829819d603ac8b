"""Plain text in UTF-8: a file is one document."""

from collections.abc import Iterator
from typing import IO

from mesh_transformer.data.corpus import cut, text_blocks
from mesh_transformer.dataset.formats.base import Format, Item


def stream(file: IO[bytes], place: str, column: str) -> Iterator[Item]:
    """The text without a byte-order mark; every end of a line is a line feed."""
    return cut(_blocks(file, place), None)


def _blocks(file: IO[bytes], place: str) -> Iterator[str]:
    begun = False
    for block in text_blocks(file, place, translate=True):
        yield block if begun else block.removeprefix("\ufeff")
        # an empty block may stand before the first character
        begun = begun or block != ""


FORMAT = Format(".txt", stream)
