"""A tensor that lies in a file as it is, row after row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint
from mesh_transformer.checkpoint.tensors import Index

BAND_BYTES = 16 << 20  # read at a time where rows are not kept as they are
TILE = 128  # a side; of 32..512 the fastest for two and four bytes


class FileTensor(NamedTuple):
    """One tensor of a local or `gs://` file, read in slices; `start` is the byte of the file where it begins."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the whole."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: Index) -> np.ndarray:
        """A slice: (sizes of `index`).

        Raises:
            DamagedCheckpoint: the file has become shorter.
        """
        first, stop, _ = index[0].indices(self.shape[0])
        columns = index[1:]
        lengths = [len(range(*s.indices(n))) for s, n in zip(columns, self.shape[1:], strict=True)]
        out = np.empty((stop - first, *lengths), self.dtype)
        if tuple(lengths) == self.shape[1:]:
            self.read_rows(first, out)
            return out
        for at, rows in self.bands(first, stop):
            out[at - first : at - first + len(rows)] = rows[(slice(None), *columns)]
        return out

    def bands(self, first: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Some rows at a time, valid until the next, with the number of the first of them.

        Raises:
            DamagedCheckpoint: the file has become shorter.
        """
        step = max(1, min(BAND_BYTES // max(1, self._row_bytes), stop - first))
        band = np.empty((step, *self.shape[1:]), self.dtype)
        for at in range(first, stop, step):
            rows = band[: stop - at]
            self.read_rows(at, rows)
            yield at, rows

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """Fill `out`, contiguous and (rows, sizes of a row), from row `first` on.

        Raises:
            DamagedCheckpoint: the file has become shorter.
        """
        buffer = out.reshape(-1).view(np.uint8).data
        found = files.read_into(self.path, self.start + first * self._row_bytes, buffer)
        if found != len(buffer):
            raise DamagedCheckpoint(f"{self.path}: {self.name}: {len(buffer)} bytes expected, {found} found")

    @property
    def _row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def copy_transposed(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source.T, for matrices (m, n) and (n, m) that are larger than the processor's caches.

    By tiles, each first copied together: the rows of a matrix are often a power of two apart, and then a column's
    elements push each other out of the cache. Three to five times as fast as numpy's own copy.
    """
    for row in range(0, target.shape[0], TILE):
        for column in range(0, target.shape[1], TILE):
            tile = source[column : column + TILE, row : row + TILE].copy()
            target[row : row + TILE, column : column + TILE] = tile.T
