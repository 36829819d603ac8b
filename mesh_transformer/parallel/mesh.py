"""The device mesh, and the rows of a batch that each process holds."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from einops import rearrange
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from mesh_transformer.config import AXES, MeshConfig, MeshShape
from mesh_transformer.config.mesh import named, part_of_a_slice
from mesh_transformer.errors import UserError


def make_hybrid_mesh(mesh: MeshConfig, shape: MeshShape, slices: Sequence[Sequence[jax.Device]]) -> Mesh:
    """A mesh over the devices of one or several slices. The network between slices is slower than that inside.

    The slices follow each other along the axis `mesh.dcn`, outside of the part of this axis that each slice has: the
    order of slices of `mesh_utils.create_hybrid_device_mesh`. Inside a slice the order is that of `make_mesh`.

    Raises:
        UserError: as in `make_mesh`; there are several slices, and `mesh.dcn` does not fit them, or they are not equal.
    """
    if len(slices) == 1:
        return make_mesh(shape, slices[0])
    sizes = [len(devices) for devices in slices]
    if len(set(sizes)) > 1:
        raise UserError(f"a mesh needs slices of the same size; devices by slice: {sizes}")
    part = part_of_a_slice(mesh, shape, len(slices))
    grids = [make_mesh(part, devices).devices for devices in slices]
    grid = np.concatenate(grids, axis=list(AXES).index(mesh.dcn or ""))
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with the axes AXES over the devices of one slice. Every process must have the same number of them.

    The devices of one process (a host, on TPU) are assigned to the last axis first, then to the one before it, and so
    on, in the order that JAX chooses for their torus. Then the processes follow in their order, again the last axis
    first. So the devices of a tp group, tp being the last axis, belong to one process if tp divides the number of its
    devices: 8 on a host of v2, v3 and v7x and on the only host of a v5e-8 or v6e-8; 4 on every other host. A larger tp
    group spans tp / gcd(tp, devices of a process) consecutive processes.

    Raises:
        UserError: the shape needs another number of devices, the processes have different numbers of devices, or a
            process's devices are not whole chips that fill a box.
    """
    if math.prod(shape.values()) != len(devices):
        raise UserError(f"a mesh {named(shape)} needs {math.prod(shape.values())} devices, found {len(devices)}")
    hosts = defaultdict(list)
    for device in devices:
        hosts[device.process_index].append(device)
    counts = {process: len(hosts[process]) for process in sorted(hosts)}
    if len(set(counts.values())) > 1:
        raise UserError(f"a mesh needs the same number of devices in every process; devices by process: {counts}")
    first = hosts[min(hosts)]
    inner = _divide(len(first), shape)
    outer = {axis: shape[axis] // inner[axis] for axis in AXES}
    order = [first.index(device) for device in _order(inner, first).flat]
    within = {f"{axis}_in": size for axis, size in inner.items()}
    grid = rearrange(
        np.array([hosts[process] for process in counts], object)[:, order],
        f"({' '.join(outer)}) ({' '.join(within)}) -> {' '.join(f'({axis} {axis}_in)' for axis in AXES)}",
        **outer,
        **within,
    )
    return Mesh(grid, tuple(AXES), axis_types=(AxisType.Auto,) * len(AXES))


def process_rows(sharding: NamedSharding, batch: int, process: int) -> tuple[int, ...]:
    """The rows of a (batch, ...) array that the devices of a process hold, ascending. Other processes may hold them
    too."""
    index: Mapping[jax.Device, tuple[slice, ...]] = sharding.devices_indices_map((batch, 1))
    spans = {rows.indices(batch) for device, (rows, _) in index.items() if device.process_index == process}
    return tuple(sorted(row for span in spans for row in range(*span)))


def _divide(devices: int, shape: MeshShape) -> MeshShape:
    """The size of each axis within one process: as many of its devices as possible for the last axis, then for the one
    before."""
    inner: MeshShape = {}
    for axis in reversed(AXES):
        inner[axis] = math.gcd(devices, shape[axis])
        devices //= inner[axis]
    return dict(reversed(inner.items()))


def _order(shape: MeshShape, devices: list[jax.Device]) -> np.ndarray:
    """The devices of one process in the order of a JAX mesh of this shape."""
    try:
        return mesh_utils.create_device_mesh(tuple(shape.values()), devices, allow_split_physical_axes=True)
    # JAX asserts that the devices are whole chips that fill a box
    except (AssertionError, ValueError) as error:
        where = f"the {len(devices)} devices of process {devices[0].process_index}"
        raise UserError(
            f"JAX cannot make a mesh {named(shape)} of {where}, which must be whole chips that fill a box: {error}"
        ) from error
