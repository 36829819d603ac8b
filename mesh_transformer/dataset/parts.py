"""Cuts inputs into parts, the work of one task each, and reads the documents of a part."""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from mesh_transformer.data.corpus.formats import FORMATS
from mesh_transformer.data.corpus.formats.base import Bad, Column, Item, Row
from mesh_transformer.data.corpus.pieces import TextPiece
from mesh_transformer.data.corpus.storage import open_file, open_range
from mesh_transformer.data.records.inflate import inflated, without_suffix
from mesh_transformer.dataset.inputs import Input, InputFile
from mesh_transformer.errors import BadDataError, UserError

__all__ = ["Bad", "FilePart", "examples", "pieces", "plan"]

_FILES_AT_ONCE = 16


@dataclass(frozen=True)
class FilePart:
    """A range of one input file: the work of one task.

    Args:
        input: number of the input, from 0.
        file: path, local, gs:// or hf://datasets/ORG/NAME@COMMIT/FILE.
        format: key of FORMATS.
        first: where the range begins: a byte of lines, a row group of Parquet, 0 of a file that is one part.
        stop: its end, exclusive, in the same unit; of a file that is one part, its size in bytes.
        size: of the file, bytes.
    """

    input: int
    file: str
    format: str
    first: int
    stop: int
    size: int

    @property
    def place(self) -> str:
        """The file and the range, for messages."""
        format = FORMATS[self.format]
        if format.cut is None or without_suffix(self.file)[1] is not None:
            return self.file
        return f"{self.file}, {format.cut.unit} {self.first:,} to {self.stop - 1:,}"


def plan(inputs: Sequence[Input], part_bytes: int, column: Column = "text") -> list[FilePart]:
    """The parts of all inputs, in their order. They depend on the arguments and on the files only.

    Args:
        part_bytes: of the file, in a part; a file that cannot be entered in the middle is one part.
        column: with the text. None: each row is an example of instruction data.

    Raises:
        UserError: `part_bytes` is below 1, all files are empty, a Parquet file is damaged, or a file has no such
            column.
    """
    if part_bytes < 1:
        raise UserError(f"a part of {part_bytes} bytes: must be 1 or more")
    numbered = [(number, file) for number, source in enumerate(inputs) for file in source.files]
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        ranges = pool.map(lambda pair: _ranges(pair[1], part_bytes, column), numbered)
        parts = [
            FilePart(number, file.path, file.format, first, stop, file.size)
            for (number, file), file_ranges in zip(numbered, ranges, strict=True)
            for first, stop in file_ranges
        ]
    if not parts:
        raise UserError("all files of the input are empty: add text")
    return parts


def _ranges(file: InputFile, part_bytes: int, column: Column) -> list[tuple[int, int]]:
    format = FORMATS[file.format]
    compression = without_suffix(file.path)[1]
    if format.cut is not None and compression is None:
        return format.cut.ranges(file.path, file.size, part_bytes, column)
    if not file.size:
        return []
    if format.check is not None:
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(open_file(file.path, file.size))
            if compression is not None:
                opened = stack.enter_context(inflated(opened, compression, file.path))
            format.check(opened, file.path, column)
    return [(0, file.size)]


def pieces(part: FilePart, column: str) -> Iterator[TextPiece | Bad]:
    """The documents of a part, in pieces. A place that is not a document gives `Bad`, also in the middle of one.

    Raises:
        UserError: the file does not exist, or may not be read.
    """
    return cast(Iterator[TextPiece | Bad], _items(part, column))


def examples(part: FilePart) -> Iterator[Row | Bad]:
    """The examples of a part. A place that is not an example gives `Bad`.

    Raises:
        UserError: as `pieces`.
    """
    return cast(Iterator[Row | Bad], _items(part, None))


def _items(part: FilePart, column: Column) -> Iterator[Item]:
    format = FORMATS[part.format]
    compression = without_suffix(part.file)[1]
    if format.cut is not None and compression is None:
        yield from format.cut.pieces(part.file, part.size, (part.first, part.stop), column)
        return
    if format.stream is None:
        raise UserError(f"{part.file}: the format {part.format} is not read compressed: decompress the file")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_range(part.file, part.size))
        if compression is not None:
            file = stack.enter_context(inflated(file, compression, part.file))
        try:
            yield from format.stream(file, part.file, column)
        except BadDataError as error:
            yield Bad.of(error)
