"""Parquet files, read by pyarrow: a document a row of the column. A range is a range of row groups."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from mesh_transformer import files, hub
from mesh_transformer.data.corpus.formats.base import Bad, Column, Cut, InputFormat, Item, Range, Row, check_columns
from mesh_transformer.data.corpus.pieces import PIECE_CHARS, TextPiece, cut, text_blocks
from mesh_transformer.data.corpus.storage import RangeFile, open_file
from mesh_transformer.errors import BadDataError, UserError, byte_size, listed

_log = logging.getLogger(__name__)
# of a row group: a warning names row groups with more
LARGE_BYTES = 1 << 28
# of a row group: more is refused where the file has less than a thousandth of it
_FREE_BYTES = 1 << 30
_MAX_INFLATION = 1100
_BUFFER_BYTES = 1 << 20
# of a batch: few, because each text may be long
_BATCH_ROWS = 64
_BATCH_BYTES = 1 << 23


def ranges(path: str, size: int, part_bytes: int, column: Column) -> list[Range]:
    """Ranges of row groups with some `part_bytes` bytes of the file, or of one row group. Reads the footer only.

    Raises:
        BadDataError: the file is damaged, or the column is missing or holds no strings.
    """
    with open_file(path, size) as file, _opened(path, file) as parquet, _errors_explained(path):
        _columns(path, parquet, column)
        sizes = _sizes(parquet)
    for number, expanded in enumerate(sizes):
        if expanded > max(_FREE_BYTES, _MAX_INFLATION * size):
            reason = f"row group {number:,} expands to {expanded:,} bytes, which no text does: it is hostile"
            raise BadDataError(path, "expands too much", reason)
    if large := [f"{number:,}" for number, expanded in enumerate(sizes) if expanded > LARGE_BYTES]:
        _log.warning(
            "%s: more than %s in row group %s; a worker may need as much memory: write the file with fewer rows a "
            "group",
            *(path, byte_size(LARGE_BYTES), listed(large)),
        )
    return _together([_in_file(sizes, [expanded], size) for expanded in sizes], part_bytes)


def _sizes(parquet: Any) -> list[int]:
    """The decompressed bytes of each row group, as the footer says.

    The metadata of a column would be exact, but pyarrow ends the process where it is damaged.
    """
    return [max(0, parquet.metadata.row_group(number).total_byte_size) for number in range(parquet.num_row_groups)]


def _in_file(sizes: list[int], chosen: list[int], size: int) -> int:
    """Approximate bytes of the file that row groups with `chosen` decompressed bytes take."""
    return sum(chosen) * size // max(1, sum(sizes))


def _together(counts: list[int], most: int) -> list[Range]:
    """Ranges of consecutive numbers whose counts add up to at most `most`. A larger count is a range of its own."""
    merged: list[Range] = []
    held = 0
    for number, count in enumerate(counts):
        held += count
        if merged and held <= most:
            merged[-1] = merged[-1][0], number + 1
        else:
            merged.append((number, number + 1))
            held = count
    return merged


def pieces(path: str, size: int, bounds: Range, column: Column) -> Iterator[Item]:
    """The documents of a range of row groups."""
    first, stop = bounds
    try:
        with _source(path, size) as file, _opened(path, file) as parquet:
            with _errors_explained(path):
                names = _columns(path, parquet, column)
                sizes = _sizes(parquet)
                groups = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
            if stop > len(groups):
                reason = f"{len(groups)} row groups, not {stop} or more as before: do not change files meanwhile"
                raise BadDataError(path, "damaged", reason)
            if isinstance(file, RangeFile):
                file.ahead = _in_file(sizes, sizes[first:stop], file.size) + _BUFFER_BYTES
            for number in range(first, stop):
                average = sizes[number] // max(1, groups[number])
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, average)))
                yield from _group(path, parquet, names, column is None, number, sum(groups[:number]), rows)
    except BadDataError as error:
        yield Bad.of(error)


@contextmanager
def _source(path: str, size: int) -> Iterator[IO[bytes] | RangeFile]:
    if files.is_remote(path):
        with RangeFile(path, size) as file:
            yield file
    else:
        with open_file(hub.dataset_file(path) if hub.is_dataset(path) else path, 0) as local:
            yield local


def _group(
    path: str, parquet: Any, names: Sequence[str], examples: bool, number: int, before: int, rows: int
) -> Iterator[Item]:
    """The documents of a row group, `rows` rows at a time.

    Args:
        names: the columns that are read.
        examples: whether a row is an example, or a text.
        before: the rows before this row group.
    """
    row = before
    try:
        with _errors_explained(f"{path}, row group {number:,} at row {before:,}"):
            for batch in parquet.iter_batches(rows, row_groups=[number], columns=list(names), use_threads=False):
                values = [each.dictionary_decode() if hasattr(each, "dictionary") else each for each in batch.columns]
                for cells in zip(*values, strict=True):
                    place = f"{path}, row {row:,}"
                    named = zip(batch.schema.names, cells, strict=True)
                    yield from _example(dict(named), place) if examples else _document(cells[0], place)
                    row += 1
    except BadDataError as error:
        yield Bad.of(error)


def _example(cells: dict[str, Any], place: str) -> Iterator[Item]:
    try:
        fields = {name: cell.as_py() for name, cell in cells.items()}
    except UnicodeDecodeError as error:
        yield _not_text(error, place)
    else:
        yield Row.of(fields, place)


def _not_text(error: UnicodeDecodeError, place: str) -> Bad:
    return Bad.of(
        BadDataError(place, "not UTF-8", f"not UTF-8 text ({error.reason}): write the column as strings again")
    )


def _document(value: Any, place: str) -> Iterator[Item]:
    if not value.is_valid:
        yield TextPiece("", True, null=True)
        return
    buffer = value.as_buffer()
    try:
        if buffer.size <= PIECE_CHARS:
            yield TextPiece(str(buffer, "utf-8"), True)
        else:
            import pyarrow

            # the text as a whole would take up to four times its bytes
            yield from cut(text_blocks(pyarrow.BufferReader(buffer), place, translate=False), None)
    except UnicodeDecodeError as error:
        yield _not_text(error, place)
    except BadDataError as error:
        yield Bad.of(error)


@contextmanager
def _opened(path: str, file: IO[bytes] | RangeFile) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: pyarrow is not installed: pip install -e '.[parquet]'") from error
    with _errors_explained(path):
        # reads page by page; pre_buffer would read whole row groups
        parquet = pyarrow.parquet.ParquetFile(
            file, pre_buffer=False, buffer_size=_BUFFER_BYTES, page_checksum_verification=True
        )
    with parquet:
        yield parquet


def _columns(path: str, parquet: Any, column: Column) -> list[str]:
    """The columns that are read.

    Raises:
        BadDataError: the file has no such columns, or a column for text holds no strings.
    """
    import pyarrow

    schema = parquet.schema_arrow
    names = check_columns(schema.names, path, column)
    if column is None:
        return names
    kind = schema.field(column).type
    kind = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
    if not any(
        test(kind) for test in (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    ):
        reason = f"the column {column!r} holds {str(kind)[:100]}; allowed: strings: choose another with --column"
        raise BadDataError(path, "not text", reason)
    return names


@contextmanager
def _errors_explained(place: str) -> Iterator[None]:
    """Turns pyarrow's errors into a BadDataError."""
    import pyarrow

    try:
        yield
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        # of the disk or of the network
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = " ".join(str(error).split())[:200]
        reason = f"Parquet data that cannot be read ({said}): download or write the file again"
        raise BadDataError(place, "damaged", reason) from error


FORMAT = InputFormat(".parquet", None, Cut("row groups", ranges, pieces))
