"""Device meshes, and the rules that map named dimensions to mesh axes. docs/library.md describes the names here."""

from mesh_transformer.config.mesh import dimension_rules, mesh_shape
from mesh_transformer.errors import UserError
from mesh_transformer.parallel.holdings import Holding, holdings
from mesh_transformer.parallel.mesh import make_mesh, process_rows
from mesh_transformer.parallel.sharding import (
    Partition,
    active,
    collect_axes,
    constrain,
    constrain_tree,
    gather_weights,
    map_axes,
    use,
    with_axes,
)

__all__ = [
    "Holding",
    "Partition",
    "UserError",
    "active",
    "collect_axes",
    "constrain",
    "constrain_tree",
    "dimension_rules",
    "gather_weights",
    "holdings",
    "make_mesh",
    "map_axes",
    "mesh_shape",
    "process_rows",
    "use",
    "with_axes",
]
