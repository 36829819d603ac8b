"""Three kinds of parallelism at once: pipeline, data and tensor (3D, Narayanan et al. 2021, arXiv:2104.04473).

    python -m examples.three_d
    python -m examples.three_d pp=2 cp=2 tp=2

The transformer and its training step are those of examples/context_parallelism.py. Nothing in them changes: a strategy
is a mesh and a table of rules.
"""

from jax.sharding import Mesh

from examples import common
from examples.context_parallelism import train
from mesh_transformer.parallel import Partition, dimension_rules

MESH = {"pp": 2, "dp": 2, "tp": 2}


def partition(mesh: Mesh) -> Partition:
    """The rules: "layers" over pp, "batch" over dp; "heads", "mlp" and "vocab" over tp."""
    return Partition(mesh, dimension_rules())


if __name__ == "__main__":
    common.main(__spec__.name, train, partition, MESH)
