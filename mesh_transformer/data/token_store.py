"""Tokenised documents in a temporary file, read back in any order as one stream."""

import os
import tempfile
from array import array
from collections.abc import Sequence
from typing import Self

import numpy as np

_BUFFER_BYTES = 1 << 20


class TokenStore:
    """Documents one behind the other on disk; memory holds 8 bytes a document."""

    def __init__(self, folder: str | None, n_vocab: int):
        self._file = tempfile.TemporaryFile(buffering=_BUFFER_BYTES, dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._dtype = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self._ends = array("q")
        self._n_tokens = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the document at hand."""
        self._file.write(np.asarray(tokens, self._dtype).tobytes())
        self._n_tokens += len(tokens)

    def end_document(self, eot: int) -> None:
        """Close the document at hand with `eot`; one without a token is passed over."""
        if self._n_tokens > self.n_tokens:
            self.add([eot])
            self._ends.append(self._n_tokens)

    @property
    def n_documents(self) -> int:
        return len(self._ends)

    @property
    def n_tokens(self) -> int:
        """Of the documents that are closed."""
        return self._ends[-1] if self._ends else 0

    def ends(self) -> np.ndarray:
        """Where each document ends, in tokens from the beginning, int64 (n_documents,)."""
        return np.array(self._ends, np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of the documents as they were added, int32."""
        self._file.flush()
        size = self._dtype.itemsize
        data = os.pread(self._file.fileno(), (stop - start) * size, start * size)
        return np.frombuffer(data, self._dtype).astype(np.int32)


class Packing:
    """All documents of a store in one order, as a single stream behind `carried` tokens, int32."""

    def __init__(self, store: TokenStore, order: np.ndarray | None, carried: np.ndarray):
        self._store, self._carried = store, carried
        ends = store.ends()
        starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
        chosen = slice(None) if order is None else order
        self._starts, self._ends = starts[chosen], np.cumsum((ends - starts)[chosen])

    def __len__(self) -> int:
        return len(self._carried) + (int(self._ends[-1]) if len(self._ends) else 0)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of the stream, int32."""
        parts = [self._carried[start:stop]]
        at, stop = max(0, start - len(self._carried)), stop - len(self._carried)
        document = int(np.searchsorted(self._ends, at, "right"))
        while at < stop:
            end = int(self._ends[document])
            before = int(self._ends[document - 1]) if document else 0
            first = int(self._starts[document]) + at - before
            taken = min(end, stop) - at
            parts.append(self._store.read(first, first + taken))
            at += taken
            document += 1
        return np.concatenate(parts)
