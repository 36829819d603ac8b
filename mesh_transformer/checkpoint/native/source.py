"""Our own form, read slice by slice: the tensors of a step folder that `CheckpointStore` or `write_native` wrote.

The tensors lie in an OCDBT key-value store as zarr arrays. Their keys are the paths in the saved tree joined by "."
(`params.blocks.attention/q.w`); the manifest joins the same paths by "/".
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
from mesh_transformer.checkpoint.tensors import Counts, DamagedCheckpoint, Index, TensorInfo
from mesh_transformer.errors import UserError

COMMIT_MARKER = "commit_success.txt"
OPTIMIZER = "opt_state/"  # before the names of an optimizer's slots and counts, as in `train.step.TrainState`
COUNT, SCHEDULE = f"{OPTIMIZER}count", f"{OPTIMIZER}schedule"
# files of the first versions have Adam's state by its position in a chain
OLD_NAMES = {
    "opt_state/1/mu/": f"{OPTIMIZER}mu/",
    "opt_state/1/nu/": f"{OPTIMIZER}nu/",
    "opt_state/1/count": COUNT,
    "opt_state/3/count": SCHEDULE,
}
CHUNK_BYTES = 2 << 20  # a slice for one of many devices reads little more than its own bytes
WRITE_BLOCK_BYTES = 16 << 20  # of the whole rows that a row of chunks holds: what a writer reads at a time
MAX_MANIFEST_BYTES = 64 << 20
# at a time, in many requests; of a local file one chunk: the allocator keeps what was held
REMOTE_READ_BYTES = 32 << 20
MAX_CHUNK_BYTES = 1 << 30  # those of our saves have 64 MiB at most
CACHE_BYTES = 1 << 20  # for the index of the key-value store; of tensors nothing is kept


class NativeSource:
    """One native step folder, local or `gs://`, as a `TensorSource`.

    The first `read` of a tensor goes over all of it and compares its checksum; later ones take the chunks they touch.
    """

    def __init__(self, folder: str):
        """Open it.

        Raises:
            DamagedCheckpoint: the manifest is broken.
            UserError: there is no such folder.
        """
        self.where, self.manifest = folder, read_manifest(folder)
        self.extra = self.manifest.extra
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._base = ocdbt(files.join(folder, "state"))
        # names in the manifest by ours
        self._stored = {ours: name for name in self.manifest.tensors if (ours := _tensor_name(name))}
        specs = {ours: self.manifest.tensors[name] for ours, name in self._stored.items()}
        self.tensors = {ours: TensorInfo(spec.shape, np.dtype(spec.dtype)) for ours, spec in specs.items()}
        self._open_arrays: dict[str, Any] = {}
        self._verified: set[str] = set()
        self._lock = threading.Lock()

    @cached_property
    def counts(self) -> Counts:
        """Step and optimizer counts.

        Raises:
            DamagedCheckpoint: one of them is no count.
        """
        return Counts(self._count("step") or 0, self._count(COUNT), self._count(SCHEDULE))

    def read(self, name: str, index: Index) -> np.ndarray:
        """The slice of a tensor, in its stored dtype.

        Raises:
            DamagedCheckpoint: its bytes are missing or not those that were written.
        """
        stored = self._stored[name]
        return self._read(stored, index, verify=stored not in self._verified)

    def read_stored(self, name: str, index: Index) -> np.ndarray:
        """The slice of a tensor by our name or its name in the manifest. Its checksum is not compared: see `verify`.

        Raises:
            DamagedCheckpoint: its bytes are missing or broken.
        """
        return self._read(self._stored.get(name, name), index, verify=False)

    def verify(self, sums: Mapping[str, int]) -> None:
        """Compare the checksums, by either name, of tensors that were read.

        Raises:
            DamagedCheckpoint: a tensor is not what was saved.
        """
        manifests.verify(self.manifest, {self._stored.get(name, name): value for name, value in sums.items()})

    def _read(self, stored: str, index: Index, *, verify: bool) -> np.ndarray:
        array, checksum = self._array(stored), 0
        spans = _spans(index, array.shape)
        out = np.empty([len(span) for span in spans], array.dtype.numpy_dtype)
        for place, values in self._read_blocks(
            stored, array, list(map(range, array.shape)) if verify else spans
        ):
            if verify:
                checksum += self.manifest.checksum(values, [part.start for part in place])
            _copy_overlap(out, spans, place, values)
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

    def _read_blocks(
        self, stored: str, array: Any, spans: Sequence[range]
    ) -> Iterator[tuple[Index, np.ndarray]]:
        """A part of a tensor, piece by piece; the next one is read meanwhile."""
        limit = REMOTE_READ_BYTES if files.is_remote(self.where) else CHUNK_BYTES
        places = blocks(spans, _chunk(array), array.dtype.numpy_dtype.itemsize, limit)
        reads = ((place, array[place].read()) for place in places)
        with self._damage_errors(stored):
            coming = next(reads, None)
            while coming is not None:
                (place, values), coming = coming, next(reads, None)
                yield place, values.result()

    def _array(self, stored: str) -> Any:
        """The open array of a tensor, which is as the manifest says."""
        with self._lock, self._damage_errors(stored):
            if stored not in self._open_arrays:
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
        return {_renamed(key.replace(".", "/")): key for key in arrays}


def read_manifest(folder: str) -> Manifest:
    """The manifest of a step folder, with the names of today.

    Raises:
        DamagedCheckpoint: it is broken or of another form.
        UserError: it is missing.
    """
    path = files.join(folder, "manifest", "metadata")
    size = files.size(path)
    if size > MAX_MANIFEST_BYTES:
        raise DamagedCheckpoint(f"the manifest of {folder} has {size} bytes: at most {MAX_MANIFEST_BYTES}")
    try:
        manifest = manifests.decode(json.loads(files.read_range(path, 0, size)))
        return manifest._replace(tensors={_renamed(name): spec for name, spec in manifest.tensors.items()})
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{folder}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"the manifest of {folder} is no JSON: {error}") from error


def ocdbt(folder: str) -> dict[str, Any]:
    """TensorStore's spec of the key-value store in a folder, local or `gs://`."""
    if not files.is_remote(folder):
        return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{os.path.abspath(folder)}/"}}
    bucket, _, path = folder.removeprefix("gs://").partition("/")
    return {"driver": "ocdbt", "base": {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}}


def _check(array: Any, spec: TensorSpec) -> None:
    """Refuse an array that is not what the manifest says, or has chunks that no save makes."""
    dtype, chunk = array.dtype.numpy_dtype, _chunk(array)
    if (tuple(array.shape), dtype) != (spec.shape, np.dtype(spec.dtype)):
        raise DamagedCheckpoint(f"expected {spec}, found {tuple(array.shape)} {array.dtype.name}")
    if math.prod(chunk) * dtype.itemsize > MAX_CHUNK_BYTES:
        raise DamagedCheckpoint(f"chunks of {chunk} are over {MAX_CHUNK_BYTES} bytes")


def _chunk(array: Any) -> tuple[int, ...]:
    return tuple(array.chunk_layout.read_chunk.shape or ())  # a scalar has none


def _spans(index: Index, shape: tuple[int, ...]) -> list[range]:
    return [range(*part.indices(size)) for part, size in zip(index, shape, strict=True)]


def _copy_overlap(out: np.ndarray, spans: Sequence[range], place: Index, values: np.ndarray) -> None:
    """Copy into `out`, which is the part `spans` of a tensor, what it has in common with `values` at `place`."""
    common = [
        range(max(span.start, part.start), min(span.stop, part.stop))
        for span, part in zip(spans, place, strict=True)
    ]
    if all(common):
        to = tuple(slice(c.start - s.start, c.stop - s.start) for c, s in zip(common, spans, strict=True))
        of = tuple(slice(c.start - p.start, c.stop - p.start) for c, p in zip(common, place, strict=True))
        out[to] = values[of]


def _renamed(stored: str) -> str:
    """The name that a tensor of a file of any version has today."""
    for before, now in OLD_NAMES.items():
        if stored.startswith(before):
            return now + stored.removeprefix(before)
    return stored


def _tensor_name(stored: str) -> str:
    """`mu/embed/tokens/w` of `opt_state/mu/embed/tokens/w`; empty for what other forms have not."""
    if stored.startswith("params/"):
        return stored
    return stored.removeprefix(OPTIMIZER) if stored.startswith(OPTIMIZER) and stored.count("/") > 1 else ""


def root_cause(error: BaseException) -> str:
    """The innermost error: all that ours says, of others the first line, without TensorStore's dump of its settings."""
    ours = (DamagedCheckpoint, UserError)
    while error.__cause__ is not None and not isinstance(error, ours):
        error = error.__cause__
    if isinstance(error, ours):
        return str(error)
    text = str(error).partition(" [tensorstore_spec")[0].partition("\n")[0]
    return f"{type(error).__name__}: {text}"[:500]


def chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """A part of one matrix of a stack, of at most CHUNK_BYTES; those beside each other hold at most WRITE_BLOCK_BYTES."""
    shape = [1 if n < len(info.shape) - 2 else max(1, size) for n, size in enumerate(info.shape)]
    while (
        len(shape) > 1
        and shape[-2] > 1
        and shape[-2] * info.shape[-1] * info.dtype.itemsize > WRITE_BLOCK_BYTES
    ):
        shape[-2] = -(-shape[-2] // 2)
    while max(shape, default=1) > 1 and math.prod(shape) * info.dtype.itemsize > CHUNK_BYTES:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return tuple(shape)


def blocks(spans: Sequence[range], chunk: Sequence[int], itemsize: int, limit: int) -> Iterator[Index]:
    """The part of a tensor that `spans` name, in C order, each chunk in one piece only.

    A piece is a contiguous block of the grid of chunks, of `limit` bytes at most unless one chunk has more; of chunks
    that `spans` cut it holds a part.
    """
    grid = [range(s.start // c, -(-s.stop // c)) for s, c in zip(spans, chunk, strict=True)]
    room, block = max(1, limit // (math.prod(chunk) * itemsize)), [1] * len(grid)
    for dim in reversed(range(len(grid))):
        block[dim] = max(1, min(len(grid[dim]), room))
        room = room // block[dim] if block[dim] == len(grid[dim]) else 1
    for corner in itertools.product(*(numbers[::n] for numbers, n in zip(grid, block, strict=True))):
        yield tuple(
            slice(max(span.start, at * size), min(span.stop, (at + n) * size))
            for span, at, n, size in zip(spans, corner, block, chunk, strict=True)
        )
