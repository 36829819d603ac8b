"""An engine with a checkpoint's weights, on the devices at hand."""

from __future__ import annotations

from typing import Any

import jax

from mesh_transformer.config import Config
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.logs import log
from mesh_transformer.models.base import Params
from mesh_transformer.ops.linear import Transposed
from mesh_transformer.parallel.sharding import Partition, inference_rules
from mesh_transformer.runtime.session import Session
from mesh_transformer.runtime.weights import read_params


def open_engine(config: Config, checkpoint: str, *, slots: int) -> SlotEngine:
    """Read the parameters of a checkpoint of any form onto the config's mesh, and allocate a cache of `slots`.

    Raises:
        UserError: the devices do not fit the mesh, or the checkpoint does not fit the config.
    """
    session = Session.open(config)
    weights = read_params(session, checkpoint)
    log.info("parameters of step %d from %s", weights.step, checkpoint)
    model, mesh = session.program.model, session.program.partition.mesh
    params = jax.jit(model.cast, donate_argnums=0)(weights.params)
    if jax.default_backend() == "cpu":
        params = as_cpus_like_it(params)
    return SlotEngine(model, Partition(mesh, inference_rules()), params, slots=slots)


def as_cpus_like_it(params: Params) -> Params:
    """The same parameters for few rows on CPU: "blocks" is a tuple of trees, one a layer, and matrices are kept transposed.

    XLA for CPU takes a layer out of a stack by copying it, at every step. The arrays given are deleted, but for the embedding's.
    """
    leaves, structure = jax.tree.flatten(params["blocks"])
    layers = zip(*[_unstacked(leaf) for leaf in leaves], strict=True)
    blocks = tuple(jax.tree.unflatten(structure, layer) for layer in layers)
    head = jax.tree.map(lambda leaf: _unstacked(leaf[None], leaf)[0], params["head"])
    return {**params, "blocks": blocks, "head": head}


def _unstacked(stack: jax.Array, *also: jax.Array) -> list[Any]:
    layers = [Transposed(layer.T) if layer.ndim == 2 else layer for layer in stack]
    jax.block_until_ready(layers)
    for array in (stack, *also):
        array.delete()
    return layers
