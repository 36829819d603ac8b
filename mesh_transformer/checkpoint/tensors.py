"""The interface to a checkpoint of any format: named whole tensors, read in slices.

Names are the paths of this program's parameter tree, joined by "/", with the shapes of its parameters:
`params/blocks/attention/q/w` is (layers, d_model, heads * d_head), `params/embed/tokens/w` is (padded_vocab, d_model).
An optimizer's slots end in these paths: Adam's moments are `mu/...` and `nu/...`. The reader of a format that stores
something else (one array per layer, shards, other axes, no padding) converts while it reads. A reader holds the
requested slice and at most one other tensor.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from mesh_transformer import files
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.spec import Tensor

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48
# read at a time from a file when the rows are cut or transposed
ROW_BLOCK_BYTES = 16 << 20

T = TypeVar("T")
_END = object()
Index = tuple[slice, ...]
"""One slice of step 1 per dimension; `slice(None)` selects the whole dimension."""


class DamagedCheckpoint(UserError):
    """A checkpoint is damaged: it cannot be read, or its bytes have changed. The message gives the reason."""


class TensorInfo(NamedTuple):
    """The shape of a whole tensor and its stored dtype (ml_dtypes.bfloat16 for bfloat16)."""

    shape: tuple[int, ...]
    dtype: np.dtype


class UpdateCounts(NamedTuple):
    """Number of updates of the run, the optimizer and the schedule. The last two are None without optimizer state."""

    step: int
    optimizer: int | None = None
    schedule: int | None = None


class TensorSource(Protocol):
    """An open checkpoint. `read` is thread-safe. Between reads a source holds at most one matrix."""

    @property
    def where(self) -> str:
        """The path that was opened, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name, with the optimizer's slots if the checkpoint has them."""

    @property
    def counts(self) -> UpdateCounts:
        """Step and optimizer counts."""

    @property
    def extra(self) -> dict[str, Any]:
        """JSON stored with the tensors: the loader's position, the config, counters. May be empty."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, in its stored dtype.

        Raises:
            DamagedCheckpoint: the bytes are missing or damaged.
        """


class CheckedSource:
    """The further methods of a `TensorSource` that compares checksums of what all processes have read."""

    def labels(self, name: str) -> Sequence[str]:
        """The labels of the checksums of a tensor."""
        raise NotImplementedError

    def read_counted(self, name: str, index: Index, *, count: bool) -> tuple[np.ndarray, dict[str, int]]:
        """`TensorSource.read` without a comparison; and if `count`, what the slice adds to the checksums, by label."""
        raise NotImplementedError

    def verify(self, sums: Mapping[str, int]) -> None:
        """Compare the sums over slices that make up whole tensors, modulo 2**32.

        Raises:
            DamagedCheckpoint: a checksum is wrong.
        """
        raise NotImplementedError


class RowTensor:
    """A tensor of a file, read in slices. A subclass has the fields, and reads rows: indices of the first dimension."""

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """Fill `out`, a contiguous array (rows, *sizes of a row), with the rows from `first` on.

        Raises:
            DamagedCheckpoint: the file is truncated.
        """
        raise NotImplementedError

    @property
    def n_bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, index: Index) -> np.ndarray:
        """A slice, with the sizes of `index`.

        Raises:
            DamagedCheckpoint: the file is truncated.
        """
        first, stop, _ = index[0].indices(self.shape[0])
        columns = index[1:]
        lengths = [len(range(*s.indices(n))) for s, n in zip(columns, self.shape[1:], strict=True)]
        out = np.empty((stop - first, *lengths), self.dtype)
        if tuple(lengths) == self.shape[1:]:
            self.read_rows(first, out)
            return out
        for at, rows in self.row_blocks(first, stop):
            out[at - first : at - first + len(rows)] = rows[(slice(None), *columns)]
        return out

    def row_blocks(self, first: int, stop: int, limit: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """The rows `first` to `stop` in blocks of at most `limit` bytes (default: ROW_BLOCK_BYTES) or one row.

        Yields the number of a block's first row and the block, whose buffer the next block overwrites.

        Raises:
            DamagedCheckpoint: the file is truncated.
        """
        step = max(1, min((limit or ROW_BLOCK_BYTES) // max(1, self.row_bytes), stop - first))
        block = np.empty((step, *self.shape[1:]), self.dtype)
        for at in range(first, stop, step):
            rows = block[: stop - at]
            self.read_rows(at, rows)
            yield at, rows


@dataclasses.dataclass(frozen=True)
class FileTensor(RowTensor):
    """A tensor whose numbers are in a local or `gs://` file one after the other.

    Args:
        start: the offset of its data in bytes.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    start: int

    def read_rows(self, first: int, out: np.ndarray) -> None:
        """See `RowTensor`."""
        buffer = out.reshape(-1).view(np.uint8).data
        found = files.read_into(self.path, self.start + first * self.row_bytes, buffer)
        if found != len(buffer):
            raise DamagedCheckpoint(f"{self.path}: {self.name}: {len(buffer)} bytes expected, {found} found")


def slots(source: TensorSource) -> set[str]:
    """The names of the optimizer's slots in a checkpoint: empty without optimizer state, {"mu", "nu"} with Adam's."""
    return {name.split("/", 1)[0] for name in source.tensors} - {"params"}


@functools.cache
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters by name, without the prefix "params/"."""
    return {path: array.shape for path, array in model.decoder().arrays().items()}


def unpadded_shape(row: Tensor, model: ModelConfig) -> tuple[int, ...]:
    """The shape of the part of the parameter that one foreign tensor holds, without padding."""
    shape = list(parameter_shapes(model)[row.parameter][row.stack_rank :])
    if row.vocab_axis is not None:
        shape[row.vocab_axis] = model.n_vocab
    return tuple(shape)


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """Yield `items`, and compute the next one in a thread while the caller uses the current one.

    An error of `items` is raised in the place of the item that it prevents.
    """
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(next, items, _END)
        while (item := pending.result()) is not _END:
            pending = pool.submit(next, items, _END)
            yield item  # type: ignore[misc]
