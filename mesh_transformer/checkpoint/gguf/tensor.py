"""A tensor of a GGUF file, or a part of one, as the family's own file has it."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, Index, RowTensor
from mesh_transformer.errors import UserError
from mesh_transformer.gguf import blocks
from mesh_transformer.gguf.header import StoredTensor


@dataclasses.dataclass(frozen=True, eq=False)
class GgufTensor(RowTensor):
    """Rows of a stored tensor.

    Args:
        path: of the file, for messages, as `name`: the name in the file.
        shape: of the part.
        stored: the tensor in the file.
        first: the first row of the part, counted in rows of the stored tensor's last dimension.
        order: int64, the stored row of each row of the part; None: they are in order.
        plus: the number that was added to the values.
    """

    stored: StoredTensor
    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    first: int = 0
    order: np.ndarray | None = None
    plus: float = 0.0

    @classmethod
    def of(cls, stored: StoredTensor) -> "GgufTensor":
        """The whole tensor.

        Raises:
            UserError: its type has no weights.
        """
        try:
            dtype = blocks.dtype_of(stored.kind)
        except UserError as error:
            raise UserError(f"{stored.path}: {stored.name}: {error}") from error
        return cls(stored, stored.path, stored.name, stored.shape, dtype)

    def part(self, index: int) -> "GgufTensor":
        """The tensor at an index of the first dimension."""
        rows = math.prod(self.shape[1:-1])
        return dataclasses.replace(self, shape=self.shape[1:], first=self.first + index * rows)

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """See `RowTensor`. Rows in another order are read with those between them."""
        try:
            if len(self.shape) == 1:
                out[...] = self._rows(0, 1)[0, first : first + len(out)]
            elif self.order is None:
                inner = math.prod(self.shape[1:-1])
                out[...] = self._rows(first * inner, len(out) * inner).reshape(out.shape)
            else:
                self._read_order(self.order[first : first + len(out)], out)
        except UserError as error:
            raise DamagedCheckpoint(str(error)) from error
        if self.plus:
            out -= np.asarray(self.plus, out.dtype)

    def _read_order(self, wanted: np.ndarray, out: np.ndarray) -> None:
        """Read runs of rows that follow each other. Rows that alternate are read with those between them."""
        starts = [0, *(np.flatnonzero(np.diff(wanted) != 1) + 1), len(wanted)]
        if 4 * len(starts) > len(wanted):
            start = int(wanted.min())
            out[...] = self._rows(start, int(wanted.max()) + 1 - start)[wanted - start]
            return
        for at, stop in itertools.pairwise(starts):
            out[at:stop] = self._rows(int(wanted[at]), stop - at)

    def _rows(self, first: int, count: int) -> np.ndarray:
        rows = np.empty((count, self.shape[-1]), self.dtype)
        blocks.read_rows(self.stored, self.first + first, rows)
        return rows


@dataclasses.dataclass(frozen=True, eq=False)
class ComputedTensor(RowTensor):
    """A tensor that is computed as a whole from others.

    Args:
        compute: makes it: an array of `shape` and `dtype`.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    compute: Callable[[], np.ndarray]

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """See `RowTensor`."""
        out[...] = self.compute()[first : first + len(out)]

    def read(self, index: Index) -> np.ndarray:
        """See `RowTensor`."""
        return np.ascontiguousarray(self.compute()[index])

    def row_blocks(self, first: int, stop: int, limit: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """See `RowTensor`. The tensor is computed once, so it is one block."""
        yield first, self.compute()[first:stop]
