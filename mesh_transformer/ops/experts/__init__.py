"""Routed experts: which experts a token goes to, and the computation of these experts on one or many devices."""

from mesh_transformer.ops.experts.dispatch import Dispatch, apply
from mesh_transformer.ops.experts.layer import Biases
from mesh_transformer.ops.experts.routing import Routing, route, statistics, total

__all__ = ["Biases", "Dispatch", "Routing", "apply", "route", "statistics", "total"]
