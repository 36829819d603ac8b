"""Pure array functions: no parameters, no state, no devices. docs/library.md describes the names here."""

from mesh_transformer.ops.attend.causal import Attend
from mesh_transformer.ops.attend.context import attention
from mesh_transformer.ops.experts import Biases, Dispatch, Routing, route
from mesh_transformer.ops.experts import apply as apply_experts
from mesh_transformer.ops.experts import statistics as router_statistics
from mesh_transformer.ops.linear import column, row

__all__ = [
    "Attend",
    "Biases",
    "Dispatch",
    "Routing",
    "apply_experts",
    "attention",
    "column",
    "route",
    "router_statistics",
    "row",
]
