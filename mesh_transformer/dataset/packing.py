"""Packing: rows of whole documents, one after the other, in place of a stream of tokens that is cut at each row.

A row has as many tokens as a record. A document of n tokens takes n of them, and n - 1 of these are targets. A document
that is longer than a row becomes full rows and a rest. Two pieces of a document share the token at which it is cut: it
is the last target of the first piece and the first input of the second, so no target is lost.
"""

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mesh_transformer.sequences import Example, runs

# pieces among which the longest that fits is chosen
_BUFFER = 1024
# the share of all tokens of rows that is left empty before a document is cut
_MOST_WASTE = 0.005


class DocumentPiece(NamedTuple):
    """A document or a part of one: `tokens` tokens from token `first` of all documents."""

    first: int
    tokens: int


def pieces_of(lengths: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """The pieces of documents that follow one another: the first token of each, and its tokens, int64 (n,) each.

    Args:
        lengths: tokens of each document, int64. A document of one token has no target, and so no piece.
        length: tokens of a row, 2 or more.
    """
    targets = length - 1
    counts = -(-(lengths - 1) // targets)
    documents = np.repeat(np.arange(len(lengths)), counts)
    # the number of each piece in its document
    numbers = np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)
    firsts = numbers * targets
    begins = np.cumsum(lengths) - lengths
    return begins[documents] + firsts, np.minimum(lengths[documents] - firsts, length)


def best_fit(pieces: Iterable[DocumentPiece], length: int, cut: bool = True) -> Iterator[list[DocumentPiece]]:
    """Rows of pieces. A row takes the longest piece that fits, again and again, from the next pieces of the input.

    Where lengths vary little, no piece may fit the rest of a row. Before all rows together have more than 0.5% of
    padding, a row gets the first part of the longest piece. The remaining part is a piece of its own.

    Args:
        pieces: each at most as long as a row. Of equal lengths, the first comes first.
        length: tokens of a row.
        cut: whether a piece may be cut so that a row is filled.
    """
    source = iter(pieces)
    # sorted: tokens, and the negative of the first token
    held = sorted((piece.tokens, -piece.first) for piece in itertools.islice(source, _BUFFER))
    padding = 0
    for number in itertools.count(1):
        if not held:
            return
        row, room = [], length
        while at := bisect.bisect_right(held, (room, 1)):
            tokens, first = held.pop(at - 1)
            row.append(DocumentPiece(-first, tokens))
            room -= tokens
        # a part of one token has no target; to cut the last piece saves no row
        fills = cut and room > 1 and len(held) > 1
        if fills and padding + room > _MOST_WASTE * number * length:
            tokens, first = held.pop()
            row.append(DocumentPiece(-first, room))
            bisect.insort(held, (tokens - room + 1, first - room + 1))
            room = 0
        yield row
        padding += room
        for piece in itertools.islice(source, max(_BUFFER - len(held), 0)):
            bisect.insort(held, (piece.tokens, -piece.first))


def example_of(
    pieces: Sequence[np.ndarray], length: int, padding: int, learned: Sequence[np.ndarray] | None = None
) -> Example:
    """The content of a row's record.

    Args:
        pieces: tokens of each piece.
        length: tokens of the row.
        padding: the token after the last piece.
        learned: for each piece, which tokens the loss counts as targets, bool. None: the record has no loss mask.
    """
    tokens = np.full(length, padding, np.int32)
    documents = np.array([len(piece) for piece in pieces], np.int64)
    used = int(documents.sum())
    tokens[:used] = np.concatenate(pieces)
    return Example(tokens, documents, None if learned is None else runs(np.concatenate(learned)))
