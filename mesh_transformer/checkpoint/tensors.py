"""What a checkpoint of any form looks like to the rest: named whole tensors that are read in slices.

The names and shapes are those of our own parameter tree, its path joined by "/": `params/blocks/attention/q/w` is
(layers, d_model, heads * d_head), `params/embed/tokens/w` is (padded_vocab, d_model). An optimizer's slots have the same
tails: Adam's moments are `mu/...` and `nu/...`. A form that stores something else (one array a layer, shards, other axes, no padding)
translates as it reads. A reader holds the slice that was asked for and no more than one tensor besides.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np

from mesh_transformer import files
from mesh_transformer.config import ComputeConfig, ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.models.model import Model

MAX_DIMENSIONS = 8
MAX_ELEMENTS = 2**48
ROW_BLOCK_BYTES = 16 << 20  # read at a time where rows are not kept as they are

T = TypeVar("T")
_END = object()
Index = tuple[slice, ...]
"""One slice of step 1 for each dimension; `slice(None)` is the whole of it."""


class DamagedCheckpoint(UserError):
    """A checkpoint cannot be read back as it was written; the message gives the reason."""


class TensorInfo(NamedTuple):
    """A whole tensor: its shape, and the dtype it is stored in (ml_dtypes.bfloat16 for bfloat16)."""

    shape: tuple[int, ...]
    dtype: np.dtype


class Counts(NamedTuple):
    """Updates done: by the run, by the optimizer and by the schedule. The last two are None where there are no slots."""

    step: int
    optimizer: int | None = None
    schedule: int | None = None


class TensorSource(Protocol):
    """An open checkpoint. Reading is thread-safe; between reads no more than one matrix is held."""

    @property
    def where(self) -> str:
        """The path that was opened, for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor by name; slots of an optimizer only if the checkpoint has them."""

    @property
    def counts(self) -> Counts:
        """Step and optimizer counts."""

    @property
    def extra(self) -> dict[str, Any]:
        """JSON that the form keeps beside the tensors: loader position, config, tokenizer. May be empty."""

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice of a tensor, in its stored dtype.

        Raises:
            DamagedCheckpoint: the bytes are missing or not what they should be.
        """


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
        for at, rows in self.row_blocks(first, stop):
            out[at - first : at - first + len(rows)] = rows[(slice(None), *columns)]
        return out

    def row_blocks(self, first: int, stop: int, limit: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Some rows at a time, of `limit` or ROW_BLOCK_BYTES, valid until the next, with the number of the first of them.

        Raises:
            DamagedCheckpoint: the file has become shorter.
        """
        step = max(1, min((limit or ROW_BLOCK_BYTES) // max(1, self._row_bytes), stop - first))
        block = np.empty((step, *self.shape[1:]), self.dtype)
        for at in range(first, stop, step):
            rows = block[: stop - at]
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


def slots(source: TensorSource) -> set[str]:
    """The names of the optimizer's slots that a checkpoint holds: none, or {"mu", "nu"} of Adam."""
    return {name.split("/", 1)[0] for name in source.tensors} - {"params"}


@functools.cache
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's parameters, by their names without "params/"."""
    init = Model(model.decoder(), ComputeConfig(dtype="float32", remat="none")).init
    leaves = jax.tree.leaves_with_path(jax.eval_shape(init, jax.random.key(0)))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """The same items; the next one is made in a thread while the caller works on this one. Errors come in their place."""
    with ThreadPoolExecutor(1) as pool:
        coming = pool.submit(next, items, _END)
        while (item := coming.result()) is not _END:
            coming = pool.submit(next, items, _END)
            yield item  # type: ignore[misc]
