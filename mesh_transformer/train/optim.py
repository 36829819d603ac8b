"""A step of any optimizer, and the original's schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesh_transformer.config import OptimizerConfig
from mesh_transformer.models.model import Params
from mesh_transformer.parallel.sharding import map_axes

OptState = dict[str, Any]
"""The direction's slots by name, each a tree like the parameters'; and two int32 scalars, the updates that the direction
(`count`) and the `schedule` have counted: steps less the skipped ones."""


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """The learning rate of the update that follows `step` finished ones: linear warm-up from 0, then a cosine.

    warmup_steps 0 starts at the peak. Float32.
    """
    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum(step / config.warmup_steps, 1.0) if config.warmup_steps else 1.0
    annealed = jnp.clip((step - config.warmup_steps) / config.anneal_steps, 0.0, 1.0)
    return warmup * config.lr - (config.lr - config.end_lr) * 0.5 * (1 - jnp.cos(jnp.pi * annealed))


class Optimizer:
    """Clip by global norm, direction, decay of matrices, learning rate.

    `axes` are the dimension names of what is trained: stacked layers do not make a bias a matrix.
    """

    def __init__(self, config: OptimizerConfig, axes: Params):
        self.config, self.axes = config, axes
        self._clip = optax.clip_by_global_norm(config.clip_norm)
        self._direction = config.direction(axes)

    def slot_axes(self, params: Params) -> dict[str, Params]:
        """The dimension names of each slot's arrays."""

        def of_slot(slot: str) -> Params:
            rule = self.config.slots[slot]
            return jax.tree.map(lambda axes, p: rule(axes, p.shape), self.axes, params, is_leaf=_is_axes)

        return {slot: of_slot(slot) for slot in self.config.slots}

    def init(self, params: Params) -> OptState:
        """The state before the first update."""
        return {**self._direction.init(params)._asdict(), "schedule": jnp.zeros((), jnp.int32)}

    def update(self, gradients: Params, state: OptState, params: Params) -> tuple[Params, OptState]:
        """What is to be added to the parameters, and the state after it."""
        decay, schedule = self.config.weight_decay, state["schedule"]
        slots = {name: value for name, value in state.items() if name != "schedule"}
        before = jax.eval_shape(self._direction.init, params)._replace(**slots)
        clipped, _ = self._clip.update(gradients, optax.EmptyState())
        direction, after = self._direction.update(clipped, before, params)
        matrices = map_axes(lambda axes: len([name for name in axes if name != "layers"]) > 1, self.axes)
        decayed = jax.tree.map(
            lambda u, p, matrix: u + decay * p if matrix else u, direction, params, matrices
        )
        updates = optax.tree.scale(-learning_rate(self.config, schedule), decayed)
        return updates, {**after._asdict(), "schedule": schedule + 1}


def _is_axes(node: Any) -> bool:
    return isinstance(node, tuple)
