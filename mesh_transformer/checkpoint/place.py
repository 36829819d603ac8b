"""From a checkpoint of any form straight onto devices.

A process reads the slices of its own devices, one after the other: beside its devices' shards it never holds more than
one slice and what the source holds, and no device more than its shards. No process reads a whole native checkpoint: each
sums the bits that it reads, and all compare the checksums together.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.agree import agreed
from mesh_transformer.checkpoint.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.native import NativeSource
from mesh_transformer.checkpoint.target import Transfer
from mesh_transformer.checkpoint.tensors import Index, TensorSource

Read = Callable[[str, Index], np.ndarray]
Sum = Callable[[np.ndarray, Sequence[int]], int]  # of a part of a tensor and where that begins


def place(source: TensorSource, abstract: Any) -> Any:
    """The tensors that `abstract` names, a pytree of `jax.ShapeDtypeStruct` with sharding such as {"params": ...}.

    Values are cast to the dtypes of `abstract`. The checksums of native tensors are compared. In several processes all
    must call it, and all get the same result.

    Raises:
        UserError: a tensor is missing or of another shape; nothing was read.
        DamagedCheckpoint: a tensor cannot be read or is not what was saved, in this process or in another.
    """
    check_shapes(source, abstract)
    if not isinstance(source, NativeSource):
        return _place_all(source.read, abstract, lambda *_: 0)[0]
    stored, checksum = source.stored, source.manifest.checksum
    state, sums = _place_all(lambda name, index: source.read_stored(stored[name], index), abstract, checksum)
    manifests.verify(source.manifest, {stored[name]: value for name, value in sums.items()})
    return state


def restore(source: NativeSource, abstract: Any, *, part: bool) -> Any:
    """As `place`, of any tree that `CheckpointStore` saved: by stored names, and in dtypes that keep every value.

    Args:
        part: the checkpoint may hold tensors that `abstract` does not name.

    Raises:
        UserError: a tensor is missing, superfluous or of another shape or dtype; nothing was read.
        DamagedCheckpoint: as in `place`.
    """
    manifests.check_fits(source.manifest, abstract, part=part, where=source.where)
    state, sums = _place_all(source.read_stored, abstract, source.manifest.checksum)
    manifests.verify(source.manifest, sums)
    return state


def check_shapes(source: TensorSource, abstract: Any) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        UserError: names tensor, expected and found.
    """
    specs = {name: TensorSpec(tuple(info.shape), info.dtype.name, 0) for name, info in source.tensors.items()}
    manifests.check_fits(Manifest(specs, {}), abstract, part=True, where=source.where, any_float=True)


def place_scalar(value: int, like: Any) -> jax.Array:
    """A number with the dtype and sharding of `like`, a scalar or its `jax.ShapeDtypeStruct`."""
    scalar = np.asarray(value, like.dtype)
    return jax.make_array_from_callback((), like.sharding, lambda _: scalar)


def _place_all(read: Read, abstract: Any, checksum: Sum) -> tuple[Any, dict[str, int]]:
    """The tensors as they lie on the devices of all processes, and their checksums as they were read."""
    leaves = manifests.flatten(abstract)
    with Transfer("reading", sum(_local_bytes(leaf) for leaf in leaves.values())) as transfer:
        placed = agreed(
            lambda: [_place(read, name, leaf, checksum, transfer) for name, leaf in leaves.items()]
        )
    parts = multihost_utils.process_allgather(np.array([part for _, part in placed], np.uint32))
    sums = parts.reshape(-1, len(placed)).sum(axis=0, dtype=np.uint32)
    state = jax.tree.unflatten(jax.tree.structure(abstract), [array for array, _ in placed])
    return state, dict(zip(leaves, map(int, sums), strict=True))


def _place(read: Read, name: str, leaf: Any, checksum: Sum, transfer: Transfer) -> tuple[jax.Array, int]:
    """One tensor, slice after slice, each read once; and this process's part of the checksum: of slices that several
    processes hold, the first counts."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True))
        devices[tuple(bounds)].append(device)
    shards, total = [], 0
    for spans, holders in devices.items():
        ours = [device for device in holders if device.process_index == jax.process_index()]
        if not ours:
            continue
        stored = read(name, tuple(slice(*span) for span in spans))
        if ours[0] == holders[0]:
            total += checksum(stored, [start for start, _ in spans])
        values = stored.astype(leaf.dtype, copy=False)
        shards += jax.block_until_ready([jax.device_put(values, device) for device in ours])
        transfer.add(values.nbytes * len(ours))
        del stored, values  # before the next slice is read
    array = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards, dtype=leaf.dtype)
    return array, total % 2**32


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """What this process's devices hold of a tensor, or will."""
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len(leaf.sharding.addressable_devices)
