"""An engine with a checkpoint's weights, on the devices at hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from mesh_transformer.config import Config
from mesh_transformer.infer.engine import SlotEngine
from mesh_transformer.logs import log
from mesh_transformer.models.base import Params
from mesh_transformer.ops.linear import PackedBlock
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
        params = as_cpus_like_it(params, model.functions.same_input)
    return SlotEngine(model, Partition(mesh, inference_rules()), params, slots=slots)


def as_cpus_like_it(params: Params, same_input: Sequence[Sequence[str]]) -> Params:
    """The same parameters for few rows on CPU: "blocks" is a tuple of packed layers, and the head's matrix is transposed.

    XLA for CPU takes a layer out of a stack by copying it, at every step. The last layer's matrices are not joined: most of
    them are applied to one position of a prompt only. The stacks are deleted.
    """
    leaves, structure = jax.tree.flatten(params["blocks"])
    layers = [jax.tree.unflatten(structure, layer) for layer in zip(*map(_unstacked, leaves), strict=True)]
    blocks = (
        *(PackedBlock.pack(layer, same_input) for layer in layers[:-1]),
        PackedBlock.pack(layers[-1], ()),
    )
    return {**params, "blocks": blocks, "head": PackedBlock.pack(params["head"], ()).unpack()}


def _unstacked(stack: jax.Array) -> list[Any]:
    layers = [stack[layer] for layer in range(len(stack))]
    jax.block_until_ready(layers)
    stack.delete()
    return layers
