"""Asynchronous tensor parallelism: the devices exchange a part of the activations while they multiply another.

    python -m examples.async_tensor_parallelism

Model and training step are in examples/tensor_parallelism.py. Between the products each device has some of the
positions ("block_seq", split over tp: Korthikanti et al. 2022, arXiv:2205.05198). `column` needs all positions, and
`row` leaves each device the sum at its own. With `overlap_tp` both go around a ring of the devices in parts (Wang et
al. 2023, doi:10.1145/3567955.3567959): the collectives are permutes, and no product waits for all parts.
"""

from jax.sharding import Mesh

from examples import common
from examples.tensor_parallelism import MESH, train
from mesh_transformer.parallel import Partition, dimension_rules


def partition(mesh: Mesh) -> Partition:
    """Two changes: the rule of "block_seq", and the ring. Without overlap_tp each product has one collective."""
    return Partition(mesh, dimension_rules(shard_activations=True), overlap_tp=True)


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
