"""From a checkpoint of any form straight onto devices.

A process reads the slices of its own devices, tensor after tensor: it never holds more than its devices' shards and
one tensor, and no device more than its shards.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.agree import agreed
from mesh_transformer.checkpoint.manifest import Manifest, TensorSpec
from mesh_transformer.checkpoint.target import Transfer
from mesh_transformer.checkpoint.tensors import Index, TensorSource


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


def _place(source: TensorSource, name: str, leaf: jax.ShapeDtypeStruct, transfer: Transfer) -> jax.Array:
    read: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # devices may hold the same slice

    def shard(index: Index | None) -> np.ndarray:
        key = tuple(s.indices(n)[:2] for s, n in zip(index or (), leaf.shape, strict=True))
        if key not in read:
            read[key] = source.read(name, tuple(slice(*span) for span in key)).astype(leaf.dtype, copy=False)
        transfer.add(read[key].nbytes)
        return read[key]

    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, leaf.sharding, shard))


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> int:
    """What this process's devices hold of a tensor, or will."""
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    return shard * len(leaf.sharding.addressable_devices)
