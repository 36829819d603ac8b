"""Tokenised documents in a temporary file, read back in any order as one stream."""

from __future__ import annotations

import os
import tempfile
from array import array
from collections.abc import Sequence

import numpy as np

_BUFFER_TOKENS = 1 << 18


class TokenStore:
    """Documents one behind the other on disk; memory holds 8 bytes a document."""

    def __init__(self, folder: str | None, n_vocab: int):
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by close)
        self._dtype = np.dtype(np.uint16 if n_vocab <= 1 << 16 else np.uint32)
        self._ends = array("q")
        self._pending: list[np.ndarray] = []
        self._n_pending, self._n_tokens = 0, 0

    def __enter__(self) -> TokenStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the document at hand."""
        chunk = np.asarray(tokens, self._dtype)
        self._pending.append(chunk)
        self._n_pending += len(chunk)
        self._n_tokens += len(chunk)
        if self._n_pending >= _BUFFER_TOKENS or len(self._pending) > 10_000:
            self._flush()

    def end_document(self, eot: int) -> bool:
        """Close the document at hand with `eot`; False if it holds no token, it is then passed over."""
        if self._n_tokens == (self._ends[-1] if self._ends else 0):
            return False
        self.add([eot])
        self._ends.append(self._n_tokens)
        return True

    @property
    def n_documents(self) -> int:
        return len(self._ends)

    @property
    def n_tokens(self) -> int:
        return self._ends[-1] if self._ends else 0

    def ends(self) -> np.ndarray:
        """Where each document ends, in tokens from the beginning, int64 (n_documents,)."""
        return np.array(self._ends, np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop of the documents as they were added, int32."""
        if self._pending:
            self._flush()
        size = self._dtype.itemsize
        data = os.pread(self._file.fileno(), (stop - start) * size, start * size)
        return np.frombuffer(data, self._dtype).astype(np.int32)

    def _flush(self) -> None:
        self._file.write(np.concatenate(self._pending).tobytes())
        self._file.flush()
        self._pending, self._n_pending = [], 0


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
