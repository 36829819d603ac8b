"""The optimizer of any tree of parameters with dimension names, and the schedule of its learning rate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from pydantic import ValidationError

from mesh_transformer.config import OptimizerConfig
from mesh_transformer.errors import UserError
from mesh_transformer.fields import STACKS
from mesh_transformer.optimizers import OPTIMIZERS
from mesh_transformer.optimizers.schedules import SCHEDULES, learning_rate
from mesh_transformer.parallel.sharding import Params, Partition, map_axes

# the dimensions that are many arrays in one: of layers, and of experts
_STACKED = (*STACKS, "experts")
OptState = dict[str, Any]
"""The optimizer's slots by name, each a tree like the parameters', and two int32 scalars: `count` and `schedule`, the
updates that the optimizer's direction and the learning rate's schedule have counted. Skipped steps do not count."""


def schedule_of(config: OptimizerConfig) -> Callable[[jax.Array], jax.Array]:
    """The learning rate of a config, float32, after a number of updates (`optimizers.schedules`)."""
    return functools.partial(learning_rate, SCHEDULES[config.schedule], config.rates)


class Optimizer:
    """Clipping by the global norm, the direction of `config`, weight decay of all but biases and norms, learning rate.

    `axes` are the dimension names of the trained parameters: they tell a matrix or a table from the stacked biases of
    all layers and experts.
    """

    def __init__(self, config: OptimizerConfig, axes: Params):
        self.config, self.axes = config, axes
        self._clip = optax.clip_by_global_norm(config.clip_norm)
        self._direction = config.direction(axes)
        # the learning rate after a number of updates, float32
        self.learning_rate = schedule_of(config)

    @classmethod
    def named(cls, name: str, axes: Params, **fields: Any) -> Optimizer:
        """The optimizer `name`, with the fields of the group `optimizer` that are not at their defaults.

        Raises:
            UserError: the optimizer is unknown, or a field or a value is not allowed.
        """
        if name not in OPTIMIZERS:
            raise UserError(f"unknown optimizer {name}: the optimizers are {', '.join(OPTIMIZERS)}")
        try:
            return cls(OPTIMIZERS[name](name=name, **fields), axes)
        except ValidationError as error:
            wrong = [f"{fault['loc'][0]} {fault['input']!r:.60}: {fault['msg']}" for fault in error.errors()]
            raise UserError(f"optimizer {name}: {'; '.join(wrong)}") from error

    def slot_axes(self, params: Params) -> dict[str, Params]:
        """The dimension names of each slot's arrays."""
        return {
            slot: jax.tree.map(lambda p, axes, rule=rule: rule(axes, p.shape), params, self.axes)
            for slot, rule in self.config.slots.items()
        }

    def shardings(self, partition: Partition, params: Params) -> OptState:
        """The sharding of each array of the state. `params` need only shapes."""
        replicated = partition.sharding()
        scalars = dict.fromkeys(jax.eval_shape(self.init, params), replicated)
        return scalars | partition.shardings(self.slot_axes(params))

    def init(self, params: Params) -> OptState:
        """The state before the first update."""
        return {**self._direction.init(params)._asdict(), "schedule": jnp.zeros((), jnp.int32)}

    def update(self, gradients: Params, state: OptState, params: Params) -> tuple[Params, OptState]:
        """The update to add to the parameters, and the new state."""
        decay, schedule = self.config.weight_decay, state["schedule"]
        slots = {name: value for name, value in state.items() if name != "schedule"}
        before = jax.eval_shape(self._direction.init, params)._replace(**slots)
        clipped, _ = self._clip.update(gradients, optax.EmptyState())
        # optax mixes dtypes and ranks
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            direction, after = self._direction.update(clipped, before, params)
        matrices = map_axes(lambda axes: len([name for name in axes if name not in _STACKED]) > 1, self.axes)
        decayed = jax.tree.map(lambda u, p, matrix: u + decay * p if matrix else u, direction, params, matrices)
        updates = optax.tree.scale(-self.learning_rate(schedule), decayed)
        return updates, {**after._asdict(), "schedule": schedule + 1}
