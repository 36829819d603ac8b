"""From a checkpoint of any form straight onto devices.

A process reads the slices of its own devices, one after the other and a large one in pieces, in the dtype that is wanted: beside
its devices' shards it never holds more than one slice and a piece of it in the stored dtype, and no device more than its
shards. On CPU a slice becomes the device's without a copy. No process reads a whole native checkpoint: each sums the bits that
it reads, and all compare the checksums together.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.native.source import NativeSource, root_cause
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint, TensorSource
from mesh_transformer.errors import CredentialsError
from mesh_transformer.logs import Transfer

BLOCK_BYTES = 128 << 20  # of a tensor, in its stored dtype: read at a time
ALIGNMENT = 64  # bytes: XLA for CPU takes an array that begins at a multiple as its own

T = TypeVar("T")
Spans = tuple[tuple[int, int], ...]  # the first and the end of a slice, by dimension


def load(source: TensorSource, abstract: Any) -> Any:
    """The tensors that `abstract` names, a pytree of `jax.ShapeDtypeStruct` with sharding such as {"params": ...}.

    Values are cast to the dtypes of `abstract`. The checksums of native tensors are compared. In several processes all
    must call it, and all get the same result.

    Raises:
        UserError: a tensor is missing or of another shape; nothing was read.
        DamagedCheckpoint: a tensor cannot be read or is not what was saved, in this process or in another.
    """
    check_shapes(source, abstract)
    with _reading(source, abstract) as reader:
        return reader.load(abstract)


def load_by_layer(source: TensorSource, abstract: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """As `load`, the parameters in parts, each read when it is asked for: ("embed", ...), ("head", ...), then ("blocks", ...)
    for each layer, without the dimension of layers.

    Args:
        abstract: the parameters by stage; the leaves of "blocks" have a leading layer dimension.

    Raises:
        UserError, DamagedCheckpoint: as in `load`; that of a wrong checksum at the end.
    """
    check_shapes(source, {"params": abstract})
    with _reading(source, {"params": abstract}) as reader:
        for stage in abstract:
            if stage != "blocks":
                yield stage, reader.load({"params": {stage: abstract[stage]}})["params"][stage]
        layer = {"params": {"blocks": jax.tree.map(_of_one_layer, abstract["blocks"])}}
        for number in range(jax.tree.leaves(abstract["blocks"])[0].shape[0]):
            yield "blocks", reader.load(layer, number)["params"]["blocks"]


def restore(source: NativeSource, abstract: Any, *, part: bool) -> Any:
    """As `load`, of any tree that `CheckpointStore` saved: by stored names, and in dtypes that keep every value.

    Args:
        part: the checkpoint may hold tensors that `abstract` does not name.

    Raises:
        UserError: a tensor is missing, superfluous or of another shape or dtype; nothing was read.
        DamagedCheckpoint: as in `load`.
    """
    manifests.check_fits(source.manifest, abstract, part=part, where=source.where)
    with _reading(source, abstract) as reader:
        return reader.load(abstract)


def check_shapes(source: TensorSource, abstract: Any) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UserError: names tensor, expected and found.
    """
    specs = {name: TensorSpec(tuple(info.shape), info.dtype.name, 0) for name, info in source.tensors.items()}
    manifests.check_fits(Manifest(specs, {}), abstract, part=True, where=source.where, any_float=True)


def put_scalar(value: int, like: Any) -> jax.Array:
    """A number with the dtype and sharding of `like`, a scalar or its `jax.ShapeDtypeStruct`."""
    scalar = np.asarray(value, like.dtype)
    return jax.make_array_from_callback((), like.sharding, lambda _: scalar)


def fail_together(read: Callable[[], T]) -> T:
    """The result of `read`, if it succeeded in every process.

    Raises:
        DamagedCheckpoint: it failed in this process or in another.
    """
    reason = ""
    try:
        result = read()
    except (CredentialsError, MemoryError, jax.errors.JaxRuntimeError):
        raise  # the machine's fault, not the checkpoint's
    except Exception as error:  # noqa: BLE001  (Orbax and TensorStore raise all sorts for a damaged file)
        reason = root_cause(error)
    failed = multihost_utils.process_allgather(np.bool_(reason))
    if np.any(failed):
        raise DamagedCheckpoint(reason or f"unreadable in processes {np.flatnonzero(failed).tolist()}")
    return result


@contextlib.contextmanager
def _reading(source: TensorSource, abstract: Any) -> Iterator[_Reader]:
    """What reads `abstract` in one or several parts; in the end the checksums of what was read are compared."""
    n_bytes = sum(map(_local_bytes, jax.tree.leaves(abstract)))
    with Transfer("reading", n_bytes) as transfer:
        reader = _Reader(source, transfer)
        yield reader
    if isinstance(source, NativeSource):
        source.verify(reader.checksums())


class _Reader:
    """Puts tensors onto the devices of all processes, and sums up what this process reads."""

    def __init__(self, source: TensorSource, transfer: Transfer):
        self._source, self._transfer = source, transfer
        self._sums: dict[str, int] = defaultdict(int)

    def load(self, abstract: Any, layer: int | None = None) -> Any:
        """Some tensors, or one layer of stacked ones."""
        leaves = manifests.flatten(abstract)
        arrays = fail_together(lambda: [self._array(name, leaf, layer) for name, leaf in leaves.items()])
        return jax.tree.unflatten(jax.tree.structure(abstract), arrays)

    def checksums(self) -> dict[str, int]:
        """Of all tensors, as all processes together have read them."""
        parts = np.array([value % 2**32 for value in self._sums.values()], np.uint32)
        sums = multihost_utils.process_allgather(parts).reshape(-1, len(parts)).sum(axis=0, dtype=np.uint32)
        return dict(zip(self._sums, map(int, sums), strict=True))

    def _array(self, name: str, leaf: Any, layer: int | None) -> jax.Array:
        """One tensor, slice after slice, each read once; of slices that several processes hold, the first one's sum counts."""
        devices: dict[Spans, list[jax.Device]] = defaultdict(list)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            bounds = (s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True))
            devices[tuple(bounds)].append(device)
        shards = []
        self._sums.setdefault(name, 0)
        for spans, holders in devices.items():
            ours = [device for device in holders if device.process_index == jax.process_index()]
            if not ours:
                continue
            values = self._slice(name, spans, leaf.dtype, layer, count=ours[0] == holders[0])
            shards += jax.block_until_ready([jax.device_put(values, device) for device in ours])
            self._transfer.add(values.nbytes * len(ours))
            del values  # before the next slice is read
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards, dtype=leaf.dtype)

    def _slice(
        self, name: str, spans: Spans, dtype: np.dtype, layer: int | None, *, count: bool
    ) -> np.ndarray:
        """A part of a tensor, or of a layer of it, in `dtype`."""
        out = _aligned([stop - start for start, stop in spans], dtype)
        stack = () if layer is None else ((layer, layer + 1),)
        for piece in _blocks(spans):
            place = (*stack, *piece)
            index = tuple(slice(*span) for span in place)
            if not isinstance(self._source, NativeSource):
                stored = self._source.read(name, index)
            else:
                stored = self._source.read_stored(name, index)
                if count:
                    self._sums[name] += self._source.manifest.checksum(stored, [start for start, _ in place])
            to = tuple(slice(a - first, b - first) for (a, b), (first, _) in zip(piece, spans, strict=True))
            out[to] = stored if layer is None else stored[0]
        return out


def _blocks(spans: Spans) -> Iterator[Spans]:
    """The same in pieces of at most BLOCK_BYTES of float32: layer by layer, then along the longest dimension."""
    sizes = [stop - start for start, stop in spans]
    parts = -(-math.prod(sizes) * 4 // BLOCK_BYTES)
    if parts <= 1 or max(sizes) == 1:
        yield spans
        return
    dim = 0 if len(sizes) > 2 and sizes[0] > 1 else sizes.index(max(sizes))
    start, stop = spans[dim]
    step = -(-sizes[dim] // parts)
    for first in range(start, stop, step):
        yield from _blocks((*spans[:dim], (first, min(first + step, stop)), *spans[dim + 1 :]))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An empty array that a CPU device takes without copying it."""
    n_bytes = math.prod(shape) * dtype.itemsize
    room = np.empty(n_bytes + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + n_bytes].view(dtype).reshape(shape)


def _of_one_layer(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
    return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=sharding)


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """What this process's devices hold of a tensor, or will."""
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len(leaf.sharding.addressable_devices)
