"""Loads tensors from a checkpoint of any format onto the devices of a mesh.

Each process reads only the slices of its own devices, one at a time, and a large slice in blocks. It casts each block
to the requested dtype. Besides the shards of its devices a process holds at most one slice, and one block of it in the
stored dtype; a device holds nothing but its shards. On CPU the device uses the buffer of the slice without a copy. No
process reads a whole native checkpoint: each computes checksums of what it reads, and the sums over all processes are
compared with the manifest.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.native.source import NativeSource, root_cause
from mesh_transformer.checkpoint.tensors import CheckedSource, DamagedCheckpoint, TensorSource
from mesh_transformer.errors import CredentialsError
from mesh_transformer.logs import Transfer

# read at a time from a tensor, counted in float32
BLOCK_BYTES = 128 << 20
# XLA for CPU uses an array at a multiple of so many bytes without a copy
ALIGNMENT = 64

T = TypeVar("T")
# start and stop of a slice in each dimension
Bounds = tuple[tuple[int, int], ...]


def load(source: TensorSource, abstract: Any) -> Any:
    """Load the tensors of `abstract`: a pytree of `jax.ShapeDtypeStruct` with shardings, such as {"params": ...}.

    Casts values to the dtypes of `abstract`. Compares the checksums of native tensors. All processes must call it, and
    all succeed or fail together.

    Raises:
        UserError: a tensor is missing or has another shape; nothing was read.
        DamagedCheckpoint: a tensor cannot be read or its checksum is wrong, in this process or in another.
    """
    check_shapes(source, abstract)
    with _reading(source, abstract) as reader:
        return reader.load(abstract)


def load_by_layer(
    source: TensorSource, abstract: dict[str, Any], rows_by_layer: Sequence[Mapping[str, tuple[str, int]]]
) -> Iterator[tuple[str, Any]]:
    """Load the parameters in parts, as `load` does, and read each part when the caller asks for it.

    Yields ("embed", ...) and ("head", ...), then ("blocks", ...) once per layer, with the modules of this layer and
    without the dimension of layers.

    Args:
        abstract: the parameters by stage; the leaves of "blocks" have a leading layer dimension.
        rows_by_layer: for each layer, by module: the name of its stack in "blocks", and the row.

    Raises:
        UserError, DamagedCheckpoint: as in `load`; a wrong checksum is raised after the last part.
    """
    check_shapes(source, {"params": abstract})
    with _reading(source, {"params": abstract}) as reader:
        for stage in abstract:
            if stage != "blocks":
                yield stage, reader.load({"params": {stage: abstract[stage]}})["params"][stage]
        for rows in rows_by_layer:
            layer = {stack: jax.tree.map(_of_one_layer, abstract["blocks"][stack]) for stack, _ in rows.values()}
            row_of = {stack: jax.tree.map(lambda _, row=row: row, layer[stack]) for stack, row in rows.values()}
            places = manifests.flatten({"params": {"blocks": row_of}})
            # no name for the arrays: it would keep them while the next layer is read
            yield "blocks", _renamed(rows, reader.load({"params": {"blocks": layer}}, places)["params"]["blocks"])


def _renamed(rows: Mapping[str, tuple[str, int]], stacks: dict[str, Any]) -> dict[str, Any]:
    """The parameters of one layer by module, from those by the name of the stack."""
    return {module: stacks[stack] for module, (stack, _) in rows.items()}


def restore(source: NativeSource, abstract: Any, *, part: bool) -> Any:
    """Load any tree that `CheckpointStore` saved, as `load` does, by its stored names and without loss of precision.

    Args:
        part: whether the checkpoint may hold tensors that `abstract` does not name.

    Raises:
        UserError: a tensor is missing, unexpected, or has another shape or dtype; nothing was read.
        DamagedCheckpoint: as in `load`.
    """
    manifests.check_fits(source.manifest, abstract, part=part, where=source.where)
    with _reading(source, abstract) as reader:
        return reader.load(abstract)


def check_shapes(source: TensorSource, abstract: Any) -> None:
    """Refuse a checkpoint whose tensors have other shapes than `abstract`.

    Raises:
        UserError: a tensor is missing or has another shape; the message names it and both shapes.
    """
    specs = {name: TensorSpec(tuple(info.shape), info.dtype.name, 0) for name, info in source.tensors.items()}
    manifests.check_fits(Manifest(specs, {}), abstract, part=True, where=source.where, any_float=True)


def put_scalar(value: int, like: Any) -> jax.Array:
    """A scalar array of `value` with the dtype and sharding of `like`, an array or a `jax.ShapeDtypeStruct`."""
    scalar = np.asarray(value, like.dtype)
    return jax.make_array_from_callback((), like.sharding, lambda _: scalar)


def fail_together(read: Callable[[], T]) -> T:
    """Call `read` in every process and return its result; if it fails in one process, fail in all.

    Raises:
        DamagedCheckpoint: `read` failed in this process or in another.
    """
    reason = ""
    try:
        result = read()
    except (CredentialsError, MemoryError, jax.errors.JaxRuntimeError):
        # a fault of the machine, not of the checkpoint
        raise
    # Orbax and TensorStore raise many types of exceptions for a damaged file
    except Exception as error:  # noqa: BLE001
        reason = root_cause(error)
    failed = multihost_utils.process_allgather(np.bool_(reason))
    if np.any(failed):
        # the message of a UserError may have several lines
        raise DamagedCheckpoint(*(reason or f"unreadable in processes {np.flatnonzero(failed).tolist()}").split("\n"))
    return result


@contextlib.contextmanager
def _reading(source: TensorSource, abstract: Any) -> Iterator[_Reader]:
    """A reader for `abstract`, in one or several parts. Compares the checksums of what was read on exit."""
    n_bytes = sum(map(_local_bytes, jax.tree.leaves(abstract)))
    with Transfer("reading", n_bytes) as transfer:
        reader = _Reader(source, transfer)
        yield reader
    if isinstance(source, CheckedSource):
        source.verify(reader.checksums())


class _Reader:
    """Loads tensors onto the devices of all processes, and computes checksums of what this process reads."""

    def __init__(self, source: TensorSource, transfer: Transfer):
        self._source, self._transfer = source, transfer
        self._sums: dict[str, int] = {}

    def load(self, abstract: Any, rows: Mapping[str, int] | None = None) -> Any:
        """Load whole tensors; or one layer of stacked tensors, given its index in each tensor."""
        leaves, rows = manifests.flatten(abstract), rows or {}
        arrays = fail_together(lambda: [self._array(name, leaf, rows.get(name)) for name, leaf in leaves.items()])
        return jax.tree.unflatten(jax.tree.structure(abstract), arrays)

    def checksums(self) -> dict[str, int]:
        """The checksums by label, from the parts that all processes have read."""
        local = np.array([value % 2**32 for value in self._sums.values()], np.uint32)
        sums = multihost_utils.process_allgather(local).reshape(-1, len(local)).sum(axis=0, dtype=np.uint32)
        return dict(zip(self._sums, map(int, sums), strict=True))

    def _array(self, name: str, leaf: Any, row: int | None) -> jax.Array:
        """Load one tensor. Each process reads each of its slices once.

        The checksum of a slice on devices of several processes is counted by the process of the first device.
        """
        devices: dict[Bounds, list[jax.Device]] = defaultdict(list)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            starts_and_stops = (s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True))
            devices[tuple(starts_and_stops)].append(device)
        shards = []
        if isinstance(self._source, CheckedSource):
            for label in self._source.labels(name):
                self._sums.setdefault(label, 0)
        for bounds, holders in devices.items():
            local = [device for device in holders if device.process_index == jax.process_index()]
            if not local:
                continue
            values = self._slice(name, bounds, leaf.dtype, row, count=local[0] == holders[0])
            shards += jax.block_until_ready([jax.device_put(values, device) for device in local])
            self._transfer.add(values.nbytes * len(local))
            # frees the memory before the next slice is read
            del values
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards, dtype=leaf.dtype)

    def _slice(self, name: str, bounds: Bounds, dtype: np.dtype, row: int | None, *, count: bool) -> np.ndarray:
        """Read a slice of a tensor, or of one row of it, in `dtype`; `count`: add it to the checksum."""
        out = _aligned([stop - start for start, stop in bounds], dtype)
        stack = () if row is None else ((row, row + 1),)
        for block in _blocks(bounds):
            stored_bounds = (*stack, *block)
            index = tuple(slice(*pair) for pair in stored_bounds)
            if isinstance(self._source, CheckedSource):
                stored, sums = self._source.read_counted(name, index, count=count)
                for label, value in sums.items():
                    self._sums[label] += value
            else:
                stored = self._source.read(name, index)
            target = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(block, bounds, strict=True))
            out[target] = stored if row is None else stored[0]
        return out


def _blocks(bounds: Bounds) -> Iterator[Bounds]:
    """Split a slice into blocks of at most BLOCK_BYTES of float32: by layers and experts, then along the longest
    dimension of a matrix."""
    sizes = [stop - start for start, stop in bounds]
    count = -(-math.prod(sizes) * 4 // BLOCK_BYTES)
    if count <= 1 or max(sizes) == 1:
        yield bounds
        return
    dim = next((dim for dim, size in enumerate(sizes[:-2]) if size > 1), sizes.index(max(sizes)))
    start, stop = bounds[dim]
    step = -(-sizes[dim] // count)
    for first in range(start, stop, step):
        yield from _blocks((*bounds[:dim], (first, min(first + step, stop)), *bounds[dim + 1 :]))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array that a CPU device uses without a copy."""
    n_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(n_bytes + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    return buffer[start : start + n_bytes].view(dtype).reshape(shape)


def _of_one_layer(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """Bytes of a tensor on the devices of this process."""
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len(leaf.sharding.addressable_devices)
