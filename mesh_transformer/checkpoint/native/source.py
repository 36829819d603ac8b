"""Reads slices of the tensors in a native step folder, which `CheckpointStore` or `write_native` wrote.

The tensors are zarr arrays in an OCDBT key-value store. Their keys are the paths in the saved tree joined by "."
(`params.blocks.attention/q.w`); the manifest joins them by "/".
"""

import contextlib
import itertools
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tensorstore as ts

from mesh_transformer import files
from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.tensors import CheckedSource, DamagedCheckpoint, Index, TensorInfo, UpdateCounts
from mesh_transformer.errors import UserError

COMMIT_MARKER = "commit_success.txt"
# prefix of the names of an optimizer's slots and counts, as in `train.step.TrainState`
OPTIMIZER = "opt_state/"
COUNT, SCHEDULE = f"{OPTIMIZER}count", f"{OPTIMIZER}schedule"
# small, so that a reader of the slice for one of many devices reads few other bytes
CHUNK_BYTES = 2 << 20
# read at a time by a writer: the rows of one row of chunks
WRITE_BLOCK_BYTES = 16 << 20
MAX_MANIFEST_BYTES = 64 << 20
# Read at a time from gs://, in many requests. From a local file one chunk is read at a time, because the allocator does
# not return freed memory.
REMOTE_READ_BYTES = 32 << 20
# the chunks that a save writes have at most 64 MiB
MAX_CHUNK_BYTES = 1 << 30
# of a tensor with small chunks: each takes 12 us, whatever it holds
MAX_CHUNKS, SMALL_CHUNK_BYTES = 100_000, 1 << 19
# for the index of the key-value store; tensors are not cached
CACHE_BYTES = 1 << 20


class NativeSource(CheckedSource):
    """One native step folder, local or `gs://`, as a `TensorSource`.

    The first `read` of a tensor reads all of it and compares its checksum; later calls read only the chunks they need.
    """

    def __init__(self, folder: str, *, manifest: Manifest | None = None):
        """Open the folder and read its manifest.

        Args:
            manifest: the folder's, if it has been read.

        Raises:
            DamagedCheckpoint: the manifest is damaged.
            UserError: the folder does not exist.
        """
        self.where, self.manifest = folder, manifest or read_manifest(folder)
        self.extra = self.manifest.extra
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._base = ocdbt(files.join(folder, "state"))
        # the name in the manifest by the name of a `TensorSource`
        self._listed = {name: listed for listed in self.manifest.tensors if (name := _tensor_name(listed))}
        specs = {name: self.manifest.tensors[listed] for name, listed in self._listed.items()}
        self.tensors = {name: TensorInfo(spec.shape, np.dtype(spec.dtype)) for name, spec in specs.items()}
        self._open_arrays: dict[str, Any] = {}
        self._verified: set[str] = set()
        self._lock = threading.Lock()

    @cached_property
    def counts(self) -> UpdateCounts:
        """Step and optimizer counts.

        Raises:
            DamagedCheckpoint: there is no step, or a count is not a whole number of 0 or more.
        """
        step = self._count("step")
        if step is None:
            raise DamagedCheckpoint(f"{self.where}: the manifest lists no step")
        return UpdateCounts(step, self._count(COUNT), self._count(SCHEDULE))

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, in its stored dtype.

        Raises:
            DamagedCheckpoint: the bytes are missing or damaged.
        """
        stored = self._listed.get(name, name)
        return self._read(stored, index, verify=stored not in self._verified)

    def read_stored(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor, without a comparison of its checksum; see `verify`.

        Args:
            name: the name in `tensors`, or the name in the manifest.

        Raises:
            DamagedCheckpoint: the bytes are missing or unreadable.
        """
        return self._read(self._listed.get(name, name), index, verify=False)

    def labels(self, name: str) -> Sequence[str]:
        """See `CheckedSource`: the name itself, in `tensors` or in the manifest."""
        return (name,)

    def read_counted(self, name: str, index: Index, *, count: bool) -> tuple[np.ndarray, dict[str, int]]:
        """See `CheckedSource`."""
        part = self.read_stored(name, index)
        if not count:
            return part, {}
        shape = self.manifest.tensors[self._listed.get(name, name)].shape
        return part, {
            name: manifests.array_checksum(part, [s.indices(n)[0] for s, n in zip(index, shape, strict=True)])
        }

    def verify(self, sums: Mapping[str, int]) -> None:
        """See `CheckedSource`."""
        manifests.verify(self.manifest, {self._listed.get(name, name): value % 2**32 for name, value in sums.items()})

    def _read(self, stored: str, index: Index, *, verify: bool) -> np.ndarray:
        array, checksum = self._array(stored), 0
        ranges = _ranges(index, array.shape)
        out = np.empty([len(part) for part in ranges], array.dtype.numpy_dtype)
        for block, values in self._read_blocks(stored, array, list(map(range, array.shape)) if verify else ranges):
            if verify:
                checksum += manifests.array_checksum(values, [part.start for part in block])
            _copy_overlap(out, ranges, block, values)
        if verify and checksum % 2**32 != self.manifest.tensors[stored].checksum:
            raise DamagedCheckpoint(f"{self.where}: wrong checksum of {stored}")
        if verify:
            self._verified.add(stored)
        return out

    def _count(self, name: str) -> int | None:
        if name not in self.manifest.tensors:
            return None
        spec = self.manifest.tensors[name]
        if spec.shape or not np.issubdtype(np.dtype(spec.dtype), np.integer):
            raise DamagedCheckpoint(f"{self.where}: {name}: expected a whole number, found {spec}")
        count = int(self._read(name, (), verify=True))
        if count < 0:
            raise DamagedCheckpoint(f"{self.where}: {name}: expected 0 or more, found {count}")
        return count

    def _read_blocks(self, stored: str, array: Any, ranges: Sequence[range]) -> Iterator[tuple[Index, np.ndarray]]:
        """The blocks of a slice, as index and values. The next block is read while the caller uses the current one."""
        limit = REMOTE_READ_BYTES if files.is_remote(self.where) else CHUNK_BYTES
        indices = blocks(ranges, _chunk(array), array.dtype.numpy_dtype.itemsize, limit)
        reads = ((block, array[block].read()) for block in indices)
        with self._damage_errors(stored):
            pending = next(reads, None)
            while pending is not None:
                (block, values), pending = pending, next(reads, None)
                yield block, values.result()

    def _array(self, stored: str) -> Any:
        """The open zarr array of a tensor, checked against the manifest."""
        with self._lock, self._damage_errors(stored):
            if stored not in self._open_arrays:
                if stored not in self._keys:
                    raise DamagedCheckpoint("the folder `state` does not hold it")
                spec = {"driver": "zarr", "kvstore": {**self._base, "path": f"{self._keys[stored]}/"}}
                array = ts.open(spec, open=True, context=self._context).result()
                _check(array, self.manifest.tensors[stored])
                self._open_arrays[stored] = array
            return self._open_arrays[stored]

    @contextlib.contextmanager
    def _damage_errors(self, stored: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, OSError, KeyError) as error:
            raise DamagedCheckpoint(f"{self.where}: {stored}: {root_cause(error)}") from error

    @cached_property
    def _keys(self) -> dict[str, str]:
        """The key of each tensor's zarr array, by its name in the manifest."""
        store = ts.KvStore.open(self._base, context=self._context).result()
        keys = [key.decode() for key in store.list().result()]
        arrays = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
        return {key.replace(".", "/"): key for key in arrays}


def read_manifest(folder: str) -> Manifest:
    """The manifest of a step folder.

    Raises:
        DamagedCheckpoint: the manifest is damaged or in an unknown format.
        UserError: the manifest is missing.
    """
    path = files.join(folder, "manifest", "metadata")
    size = files.size(path)
    if size > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(f"the manifest of {folder} has {size} bytes, at most {MAX_MANIFEST_BYTES} are read")
    try:
        return manifests.decode(json.loads(files.read_range(path, 0, size)))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{folder}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"the manifest of {folder} is not JSON: {error}") from error


def ocdbt(folder: str) -> dict[str, Any]:
    """TensorStore's spec for the key-value store in a folder, local or `gs://`."""
    if not files.is_remote(folder):
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(folder)}/"}}
    bucket, _, path = folder.removeprefix("gs://").partition("/")
    return {"driver": "ocdbt", "base": {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}}


def _check(array: Any, spec: TensorSpec) -> None:
    """Refuse an array that does not match the manifest, or whose chunks are larger, more or compressed otherwise than
    any save writes."""
    dtype, chunk = array.dtype.numpy_dtype, _chunk(array)
    if (tuple(array.shape), dtype) != (spec.shape, np.dtype(spec.dtype)):
        raise DamagedCheckpoint(f"expected {spec}, found {tuple(array.shape)} {array.dtype.name}")
    if math.prod(chunk) * dtype.itemsize > MAX_CHUNK_BYTES:
        raise DamagedCheckpoint(f"chunks of {chunk} are over {MAX_CHUNK_BYTES} bytes")
    count = math.prod(-(-size // each) for size, each in zip(array.shape, chunk, strict=True))
    if count > MAX_CHUNKS and math.prod(chunk) * dtype.itemsize < SMALL_CHUNK_BYTES:
        raise DamagedCheckpoint(f"it has {count:,} chunks of {chunk}, at most {MAX_CHUNKS:,} are read")
    compressor = (array.codec.to_json().get("compressor") or {}).get("id")
    if compressor not in (None, "zstd"):
        raise DamagedCheckpoint(f"its chunks are compressed with {compressor}; only zstd and none are read")


def _chunk(array: Any) -> tuple[int, ...]:
    # None for a scalar
    return tuple(array.chunk_layout.read_chunk.shape or ())


def _ranges(index: Index, shape: tuple[int, ...]) -> list[range]:
    return [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]


def _copy_overlap(out: np.ndarray, ranges: Sequence[range], block: Index, values: np.ndarray) -> None:
    """Copy the overlap of `values`, the slice `block` of a tensor, into `out`, the slice `ranges` of it."""
    overlap = [
        range(max(requested.start, part.start), min(requested.stop, part.stop))
        for requested, part in zip(ranges, block, strict=True)
    ]
    if all(overlap):
        target = tuple(slice(o.start - r.start, o.stop - r.start) for o, r in zip(overlap, ranges, strict=True))
        source = tuple(slice(o.start - b.start, o.stop - b.start) for o, b in zip(overlap, block, strict=True))
        out[target] = values[source]


def _tensor_name(stored: str) -> str:
    """The name in a `TensorSource`: `mu/embed/tokens/w` for `opt_state/mu/embed/tokens/w`; empty for scalars."""
    if stored.startswith("params/"):
        return stored
    return stored.removeprefix(OPTIMIZER) if stored.startswith(OPTIMIZER) and stored.count("/") > 1 else ""


def root_cause(error: BaseException) -> str:
    """The message of the innermost error: the whole of a UserError, else the first line without TensorStore's spec."""
    while error.__cause__ is not None and not isinstance(error, UserError):
        error = error.__cause__
    if isinstance(error, UserError):
        return str(error)
    text = str(error).partition(" [tensorstore_spec")[0].partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """The shape of a chunk: a part of one matrix, at most CHUNK_BYTES. A row of chunks has at most
    WRITE_BLOCK_BYTES."""
    shape = [1 if n < len(info.shape) - 2 else max(1, size) for n, size in enumerate(info.shape)]
    while len(shape) > 1 and shape[-2] > 1 and shape[-2] * info.shape[-1] * info.dtype.itemsize > WRITE_BLOCK_BYTES:
        shape[-2] = -(-shape[-2] // 2)
    while max(shape, default=1) > 1 and math.prod(shape) * info.dtype.itemsize > CHUNK_BYTES:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return tuple(shape)


def blocks(ranges: Sequence[range], chunk: Sequence[int], itemsize: int, limit: int) -> Iterator[Index]:
    """Split the slice `ranges` of a tensor into blocks, in C order. Each chunk is in one block only.

    A block is a contiguous part of the grid of chunks, of at most `limit` bytes unless one chunk has more. It holds
    only the part of a chunk that is in `ranges`.
    """
    grid = [range(s.start // c, -(-s.stop // c)) for s, c in zip(ranges, chunk, strict=True)]
    n_chunks, block = max(1, limit // (math.prod(chunk) * itemsize)), [1] * len(grid)
    for dim in reversed(range(len(grid))):
        block[dim] = max(1, min(len(grid[dim]), n_chunks))
        n_chunks = n_chunks // block[dim] if block[dim] == len(grid[dim]) else 1
    for corner in itertools.product(*(numbers[::n] for numbers, n in zip(grid, block, strict=True))):
        yield tuple(
            slice(max(requested.start, at * size), min(requested.stop, (at + n) * size))
            for requested, at, n, size in zip(ranges, corner, block, chunk, strict=True)
        )
