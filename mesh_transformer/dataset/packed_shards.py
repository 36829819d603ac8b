"""The last task of a packed data set: records of whole documents (packing.py).

A shard has the pieces of documents that begin in its range of tokens. So the shards have nearly the same size, and a
long document may be in several. Memory does not grow with a shard: its tokens, its pieces and its rows are in files.
"""

import os
from collections.abc import Iterator, Sequence
from typing import IO, NamedTuple

import numpy as np

from mesh_transformer.dataset.counts import ROW
from mesh_transformer.dataset.fragment import LEARNED
from mesh_transformer.dataset.objects import spool
from mesh_transformer.dataset.packing import DocumentPiece, best_fit, example_of, pieces_of
from mesh_transformer.dataset.shards import Shard, Source, Taken, copy_taken, cuts, runs_of, write_examples
from mesh_transformer.files import read_range
from mesh_transformer.sequences import Example

# rows of a fragment's table that are read at once, and pieces
_TABLE_ROWS, _PIECES = 1 << 20, 1 << 16
# a piece in a file: its first token, and its tokens
_PIECE = np.dtype("<i8")
_PIECE_BYTES = 2 * _PIECE.itemsize


class RowPacking(NamedTuple):
    """How rows are packed.

    Args:
        length: tokens of a row.
        padding: the token after the last document of a row.
        examples: the documents are examples of instruction data, which are never cut to fill a row.
    """

    length: int
    padding: int
    examples: bool = False


def packed_cuts(tokens: int, length: int, most: int) -> list[int]:
    """The tokens at which the shards of a side begin, and the number of tokens.

    Args:
        tokens: of the side.
        length: of a row.
        most: tokens of a shard.
    """
    # a piece begins in each range of `length` tokens, and a shard has more than half of these, so none is empty
    return cuts(tokens, 1, max(most, 2 * length))


def write_packed_shard(
    target: str, scratch: str, result: str, taken: Sequence[Taken], packing: RowPacking, width: int
) -> Shard:
    """Write a shard of packed rows. Its records are in an order that does not depend on their lengths.

    Args:
        target: path of the record file, without its suffix.
        result: path of the object with the result.
        width: bytes of a token in fragments.
    """
    with spool(scratch) as tokens, spool(scratch) as pieces, spool(scratch) as rows:
        for span, runs in zip(taken, runs_of(taken), strict=True):
            _copy_pieces(span, runs, packing.length, width, tokens, pieces)
        ends = [0]
        for row in best_fit(_read_pieces(pieces), packing.length, cut=not packing.examples):
            rows.write(np.array(row, _PIECE).tobytes())
            ends.append(rows.tell())
        tokens.flush()
        rows.flush()
        examples = (_example(ends[row], ends[row + 1], rows, tokens, width, packing) for row in _order(len(ends) - 1))
        return write_examples(target, scratch, result, examples)


def _copy_pieces(
    span: Taken, runs: np.ndarray | None, length: int, width: int, tokens: IO[bytes], pieces: IO[bytes]
) -> None:
    """Append the pieces that begin in a range, and their tokens. A piece begins where its tokens are in `tokens`."""
    place, stop = tokens.tell() // width, span.first
    begin: int | None = None
    for firsts, counts in _pieces_in(span, runs, length):
        begin = int(firsts[0]) if begin is None else begin
        stop = int(firsts[-1] + counts[-1])
        pieces.write(np.stack((firsts - begin + place, counts), axis=1).astype(_PIECE).tobytes())
    if begin is not None:
        copy_taken(Taken(span.source, begin, stop), runs, width, tokens)


def _pieces_in(span: Taken, runs: np.ndarray | None, length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The pieces that begin in a range, first tokens and tokens, int64 (n,) each, in blocks. Tokens of duplicates are
    not counted."""
    begin = 0
    for lengths in _lengths(span.source, runs):
        begins = begin + np.cumsum(lengths) - lengths
        begin += int(lengths.sum())
        near = (begins < span.stop) & (begins + lengths > span.first)
        if near.any():
            firsts, counts = pieces_of(lengths[near], length)
            firsts += begins[near][0]
            inside = (firsts >= span.first) & (firsts < span.stop)
            if inside.any():
                yield firsts[inside], counts[inside]
        if begin >= span.stop:
            return


def _lengths(source: Source, runs: np.ndarray | None) -> Iterator[np.ndarray]:
    """Tokens of the documents of a source without the duplicates, int64 (n,), in blocks."""
    table, begin, step = source.table, 0, _TABLE_ROWS * ROW.itemsize
    for at in range(0, table.length, step):
        rows = np.frombuffer(read_range(table.path, table.at + at, min(step, table.length - at)), ROW)
        lengths = rows["tokens"].astype(np.int64)
        begins = begin + np.cumsum(lengths) - lengths
        begin += int(lengths.sum())
        yield lengths if runs is None else lengths[_inside(begins, runs)]


def _inside(places: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Whether each place is in a run, bool (n,)."""
    numbers = np.searchsorted(runs["first"], places.astype(np.uint64), "right") - 1
    return (numbers >= 0) & (places < runs["stop"][numbers])


def _read_pieces(file: IO[bytes]) -> Iterator[DocumentPiece]:
    file.seek(0)
    while block := file.read(_PIECES * _PIECE_BYTES):
        yield from _pieces(block)


def _pieces(content: bytes) -> list[DocumentPiece]:
    return [DocumentPiece(*pair) for pair in np.frombuffer(content, _PIECE).reshape(-1, 2).tolist()]


def _order(rows: int) -> np.ndarray:
    """A fixed random order: best fit has the long pieces first. The numbers of a bit generator are the same in all
    versions of numpy; its permutations are not."""
    return np.argsort(np.random.PCG64(0).random_raw(rows), kind="stable")


def _example(begin: int, end: int, rows: IO[bytes], tokens: IO[bytes], width: int, packing: RowPacking) -> Example:
    """The record of the row whose pieces are bytes `begin` to `end` of the file `rows`."""
    pieces = _pieces(os.pread(rows.fileno(), end - begin, begin))
    contents = [os.pread(tokens.fileno(), piece.tokens * width, piece.first * width) for piece in pieces]
    stored = [np.frombuffer(content, f"<u{width}") for content in contents]
    if not packing.examples:
        return example_of(stored, packing.length, packing.padding)
    learned = [piece >= LEARNED for piece in stored]
    return example_of([piece % LEARNED for piece in stored], packing.length, packing.padding, learned)
