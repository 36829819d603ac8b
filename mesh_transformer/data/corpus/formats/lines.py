"""JSON lines: a document a line. A range has the lines that begin in it."""

from collections.abc import Iterator
from typing import IO

from mesh_transformer.data.corpus import pieces as corpus
from mesh_transformer.data.corpus.formats.base import Bad, Column, Cut, InputFormat, Item, Range, Row
from mesh_transformer.data.corpus.pieces import TextPiece, cut, json_text, json_value
from mesh_transformer.data.corpus.storage import open_range
from mesh_transformer.errors import BadDataError

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_STEP_BYTES = 1 << 20
# bytes read beyond a range in a bucket, because its last line may end there
_AFTER_BYTES = 1 << 20


def ranges(path: str, size: int, part_bytes: int, column: Column) -> list[Range]:
    """Ranges of `part_bytes` bytes."""
    return [(first, min(first + part_bytes, size)) for first in range(0, size, part_bytes)]


def pieces(path: str, size: int, bounds: Range, column: Column) -> Iterator[Item]:
    """The documents of the lines that begin in a range of bytes."""
    first, stop = bounds
    with open_range(path, size, max(0, first - 1), stop + _AFTER_BYTES) as file:
        # a line begins at `first` if the byte before it ends a line
        begins = _after_line(file, first - 1, stop) if first else 0
        yield from _documents(file, path, column, begins, stop)


def stream(file: IO[bytes], place: str, column: Column) -> Iterator[Item]:
    """The documents of all lines."""
    return _documents(file, place, column, 0, None)


def _documents(file: IO[bytes], place: str, column: Column, at: int, stop: int | None) -> Iterator[Item]:
    """The documents of the lines that begin before byte `stop`. The file is at byte `at`, where a line begins."""
    while (stop is None or at < stop) and (line := file.readline(corpus.MAX_LINE_BYTES + 1)):
        where = f"{place}, line at byte {at:,}"
        begins = at == 0
        content = line.removeprefix(_BYTE_ORDER_MARK) if begins else line
        at += len(line)
        if len(line) > corpus.MAX_LINE_BYTES:
            yield Bad.of(corpus.line_too_long(where))
            at = at if line.endswith(b"\n") else _after_line(file, at, stop)
        elif content.strip():
            try:
                if begins and content.lstrip().startswith(b"["):
                    reason = "a JSON array: write one object a line, or name a file that is one array .json"
                    raise BadDataError(where, "an array", reason)
                yield from document(content, where, column)
            except BadDataError as error:
                yield Bad.of(error)


def document(content: bytes, where: str, column: Column) -> Iterator[Item]:
    """The document of a value of JSON, or its example.

    Raises:
        BadDataError: there is none.
    """
    if column is None:
        yield Row.of(json_value(content, where, "those of an example"), where)
        return
    text = json_text(content, where, column)
    yield from cut([text], None) if text is not None else [TextPiece("", True, null=True)]


def _after_line(file: IO[bytes], at: int, stop: int | None) -> int:
    """Pass the rest of a line. Returns the byte after it, at most `stop`."""
    while stop is None or at < stop:
        passed = file.readline(_STEP_BYTES if stop is None else min(_STEP_BYTES, stop - at))
        if not passed:
            break
        at += len(passed)
        if passed.endswith(b"\n"):
            break
    return at


FORMAT = InputFormat(".jsonl", stream, Cut("bytes", ranges, pieces))
