"""The content of a record, and a batch of token sequences: tokens, documents, and which tokens are learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np


class Example(NamedTuple):
    """The content of a record.

    Args:
        tokens: int32 (n,).
        documents: int64: the lengths of its documents, in order; the tokens after them are padding. None: unknown.
        loss: int64: the lengths of alternating runs of tokens, the first one not learned; the tokens after them
            are not learned. None: all tokens are learned.
    """

    tokens: np.ndarray
    documents: np.ndarray | None = None
    loss: np.ndarray | None = None


class Sequences(NamedTuple):
    """A batch of sequences, on the host or on devices.

    The leading dimensions are (A, B), A microbatches of B sequences, or (B,). A sequence has T + 1 tokens: each but the
    first is the target of the one before. All batches of a run have the same arrays.
    """

    # int32 (..., T + 1)
    tokens: Any
    # int32 (..., T + 1): the number of each token's document in its sequence, from 1; 0: padding. Documents follow one
    # another. None: a sequence is one document
    documents: Any = None
    # bool (..., T + 1): whether the loss counts the prediction of this token. None: it counts every prediction
    learned: Any = None
    # int32 (...): the source of each sequence, by its place among the names of a mixture. None: there is one source
    sources: Any = None

    def map(self, change: Callable[[Any], Any]) -> Sequences:
        """The batch with `change` applied to each array."""
        return Sequences(*(None if array is None else change(array) for array in self))

    @property
    def weighted(self) -> bool:
        """Whether the loss may exclude targets."""
        return self.documents is not None or self.learned is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self if array is not None)

    @classmethod
    def of(cls, examples: Sequence[Example], *, documents: bool, learned: bool) -> Sequences:
        """Examples of equal length, one a sequence: (B, T + 1).

        Args:
            documents: whether the sequences have documents; if not, the documents of the examples are ignored.
            learned: whether the sequences have a loss mask; if not, the masks of the examples are ignored.
        """
        return cls(
            np.stack([example.tokens for example in examples]),
            np.stack([document_numbers(example) for example in examples]) if documents else None,
            np.stack([learned_tokens(example) for example in examples]) if learned else None,
        )


def document_numbers(example: Example) -> np.ndarray:
    """The number of each token's document, int32 (T + 1,), from 1; 0: padding."""
    count = len(example.tokens)
    lengths = np.array([count]) if example.documents is None else example.documents
    numbers = np.zeros(count, np.int32)
    numbers[: lengths.sum()] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return numbers


def learned_tokens(example: Example) -> np.ndarray:
    """Whether each token is learned, bool (T + 1,)."""
    count = len(example.tokens)
    if example.loss is None:
        return np.ones(count, bool)
    learned = np.zeros(count, bool)
    learned[: example.loss.sum()] = np.repeat(np.arange(len(example.loss)) % 2 == 1, example.loss)
    return learned


def runs(learned: np.ndarray) -> np.ndarray:
    """The lengths of alternating runs of a mask, bool (n,): int64, the first run not learned (perhaps of length 0)."""
    edges = np.flatnonzero(np.diff(learned.astype(np.int8), prepend=0)) if len(learned) else np.array([], int)
    return np.diff(edges, prepend=0, append=len(learned))
