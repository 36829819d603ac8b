"""What each device of a mesh holds: its part of each named dimension, and its bytes of arrays."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from mesh_transformer.config import MeshShape
from mesh_transformer.parallel.sharding import Partition

Spans = tuple[range, ...]
"""Ascending ranges of consecutive indices."""


class Holding(NamedTuple):
    """The place of one device in the mesh, and its part of each dimension."""

    device: jax.Device
    # its index on each mesh axis
    place: MeshShape
    # the indices of each dimension
    parts: dict[str, Spans]


def holdings(partition: Partition, sizes: Mapping[str, int]) -> list[Holding]:
    """What each device of the mesh holds of dimensions of these sizes, in the order of the mesh. Nothing is compiled.

    Indices of `seq` and `block_seq` are positions of tokens, in whatever order the devices hold them.

    Args:
        sizes: of each named dimension; its axes must divide it.
    """
    parts: dict[jax.Device, dict[str, Spans]] = defaultdict(dict)
    for name, size in sizes.items():
        order = partition.sequence_order(size) if name in ("seq", "block_seq") else None
        known: dict[tuple[int, int, int], Spans] = {}
        for device, (index,) in partition.sharding(name).devices_indices_map((size,)).items():
            part = index.indices(size)
            if part not in known:
                known[part] = spans(range(*part) if order is None else order[index].tolist())
            parts[device][name] = known[part]
    return [
        Holding(device, dict(zip(partition.mesh.axis_names, place, strict=True)), parts[device])
        for place, device in np.ndenumerate(partition.devices)
    ]


def bytes_per_device(tree: object) -> int:
    """The bytes of one device of a tree of `jax.ShapeDtypeStruct` with shardings."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def spans(indices: Iterable[int]) -> Spans:
    """Indices as ascending ranges of consecutive indices."""
    return merged(range(index, index + 1) for index in indices)


def merged(ranges: Iterable[range]) -> Spans:
    """The indices of all ranges, as ascending ranges with gaps between them."""
    disjoint: list[range] = []
    for interval in sorted(ranges, key=lambda span: span.start):
        if disjoint and interval.start <= disjoint[-1].stop:
            disjoint[-1] = range(disjoint[-1].start, max(disjoint[-1].stop, interval.stop))
        else:
            disjoint.append(interval)
    return tuple(disjoint)
