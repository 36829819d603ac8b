"""Counts of documents, from rows of a fragment's table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# a row of a fragment's table: hash of the text, tokens with the end-of-text token, bytes of UTF-8
ROW = np.dtype([("hash", "V16"), ("tokens", "<u8"), ("bytes", "<u8")])
# bins of document lengths in a factor of two, and how many bins there are
PER_OCTAVE = 4
BINS = 40 * PER_OCTAVE


@dataclass(frozen=True)
class DocumentCounts:
    """Counts of documents.

    Args:
        tokens: with the end-of-text tokens.
        bytes: of the text as UTF-8.
        lengths: how many documents have 2**(i / PER_OCTAVE) tokens or more, and less than bin i + 1 has.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    lengths: tuple[int, ...] = (0,) * BINS

    @classmethod
    def of(cls, rows: np.ndarray) -> DocumentCounts:
        """The counts of rows of a table, with `tokens` and `bytes`, (n,)."""
        tokens = rows["tokens"]
        bins = np.minimum(np.log2(tokens.astype(np.float64)) * PER_OCTAVE, BINS - 1).astype(np.int64)
        lengths = np.bincount(bins, minlength=BINS).tolist()
        return cls(len(rows), int(tokens.sum()), int(rows["bytes"].sum()), tuple(lengths))

    def __add__(self, other: DocumentCounts) -> DocumentCounts:
        lengths = tuple(map(sum, zip(self.lengths, other.lengths, strict=True)))
        return DocumentCounts(
            self.documents + other.documents, self.tokens + other.tokens, self.bytes + other.bytes, lengths
        )


def total(counts: Iterable[DocumentCounts]) -> DocumentCounts:
    """The sum of all counts."""
    return sum(counts, DocumentCounts())


def add_reasons(reasons: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sums of the counts by reason, in the order of the names."""
    sums: dict[str, int] = {}
    for counts in reasons:
        for reason, count in counts.items():
            sums[reason] = sums.get(reason, 0) + count
    return dict(sorted(sums.items()))
