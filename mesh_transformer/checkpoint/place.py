"""From a checkpoint of any form straight onto devices.

A process reads the slices of its own devices, one after the other: beside its devices' shards it never holds more than
one slice and what the source holds, and no device more than its shards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import jax
import numpy as np

from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.agree import agreed
from mesh_transformer.checkpoint.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.target import Transfer
from mesh_transformer.checkpoint.tensors import TensorSource


def place(source: TensorSource, abstract: Any) -> Any:
    """The tensors that `abstract` names, a pytree of `jax.ShapeDtypeStruct` with sharding such as {"params": ...}.

    Values are cast to the dtypes of `abstract`. In several processes all must call it, and all get the same result.

    Raises:
        UserError: a tensor is missing or of another shape; nothing was read.
        DamagedCheckpoint: a tensor cannot be read, in this process or in another.
    """
    check_shapes(source, abstract)
    leaves = manifests.flatten(abstract)
    with Transfer("reading", sum(_local_bytes(leaf) for leaf in leaves.values())) as transfer:
        arrays = agreed(lambda: [_place(source, name, leaf, transfer) for name, leaf in leaves.items()])
    return jax.tree.unflatten(jax.tree.structure(abstract), arrays)


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


def _place(source: TensorSource, name: str, leaf: Any, transfer: Transfer) -> jax.Array:
    """One tensor, slice after slice; a slice that several devices hold is read once."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = defaultdict(list)
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        bounds = (s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True))
        devices[tuple(bounds)].append(device)
    shards = []
    for spans, holders in devices.items():
        values = source.read(name, tuple(slice(*span) for span in spans)).astype(leaf.dtype, copy=False)
        shards += jax.block_until_ready([jax.device_put(values, device) for device in holders])
        transfer.add(values.nbytes * len(holders))
        del values  # before the next slice is read
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """What this process's devices hold of a tensor, or will."""
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len(leaf.sharding.addressable_devices)
