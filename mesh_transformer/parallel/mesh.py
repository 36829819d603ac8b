"""The device mesh."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh

from mesh_transformer.config import MeshShape

AXES = MeshShape._fields


def make_mesh(shape: MeshShape, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh with axes dp, fsdp and tp over `devices`; tp varies fastest, so it stays within a host."""
    return jax.make_mesh(tuple(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
