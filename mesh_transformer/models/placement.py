"""Where a model's arrays lie: its dimension names, a table and a mesh, together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mesh_transformer import platforms
from mesh_transformer.config import Config
from mesh_transformer.models.model import Model, Params
from mesh_transformer.parallel.mesh import make_mesh
from mesh_transformer.parallel.sharding import MeshAxes, Partition, constrain_tree, training_rules


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A model on a mesh: what every compiled program is made of. Nothing is allocated."""

    model: Model
    partition: Partition

    @classmethod
    def of(cls, config: Config, devices: Sequence[jax.Device]) -> Placement:
        """The model and the mesh of a config, split as in training.

        Raises:
            UserError: the devices do not fit the mesh.
        """
        model = Model(config.model.decoder(), platforms.resolve(config.compute, devices[0].platform))
        mesh = make_mesh(config.mesh.shape(len(devices)), devices)
        return cls(model, Partition(mesh, training_rules(config.mesh)))

    def with_rules(self, **rules: MeshAxes) -> Placement:
        """The same model on the same mesh with some names sharded otherwise."""
        return Placement(self.model, self.partition.with_rules(**rules))

    def size(self, name: str) -> int:
        """Devices that split a named dimension."""
        return self.partition.size(name)

    @property
    def shardings(self) -> Params:
        """The sharding of each parameter."""
        return self.partition.shardings(self.model.axes)

    def abstract(self, dtype: jnp.dtype) -> Params:
        """The parameters as `jax.ShapeDtypeStruct` of this dtype with their shardings."""
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
            shapes,
            self.shardings,
        )

    def cast(self, params: Params, axes: Params | None = None) -> Params:
        """Inside a program: parameters, or a part with these dimension names, in the compute dtype; split as stored."""
        axes = self.model.axes if axes is None else axes
        return constrain_tree(self.model.cast(params), self.partition, axes)

    def gather(self, params: Params, axes: Params) -> Params:
        """Inside a program: parameters with these dimension names whole over fsdp, all at once."""
        return constrain_tree(params, self.partition.with_rules(embed=None), axes)
