"""Replicas: the devices along the mesh axes that split only the batch. Each replica has all weights."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import PartitionSpec as P

from mesh_transformer.parallel.sharding import Function, Partition, Specs, Tree


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The replicas of a partition, for code inside of `run`."""

    partition: Partition

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes of the replicas."""
        return self.partition.replica_axes

    @property
    def count(self) -> int:
        """The number of replicas."""
        return math.prod(self.partition.mesh.shape[axis] for axis in self.axes)

    def split(self, dimension: int) -> P:
        """The split of an array over the replicas in one dimension."""
        return P(*[None] * dimension, self.axes)

    def run(self, function: Function, in_specs: Specs, out_specs: Specs) -> Function:
        """`function` on each replica; the partitioner splits over the other axes, and sends nothing between replicas.

        Without `check_vma`: with it, the gradient of the weights would be summed over the replicas where the weights
        are used, in each layer.
        """
        return jax.shard_map(
            function,
            mesh=self.partition.current_mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=set(self.axes),
            check_vma=False,
        )

    def mean(self, tree: Tree) -> Tree:
        """The mean over all replicas, float32."""
        return jax.lax.pmean(tree, self.axes)
