"""Adam with decoupled decay, and the original's schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mesh_transformer.config import OptimizerConfig
from mesh_transformer.models.model import Params
from mesh_transformer.parallel.sharding import map_axes


def learning_rate(config: OptimizerConfig, step: jax.Array) -> jax.Array:
    """The learning rate of the update that follows `step` finished ones: linear warm-up from 0, then a cosine.

    warmup_steps 0 starts at the peak. Float32.
    """
    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum(step / config.warmup_steps, 1.0) if config.warmup_steps else 1.0
    annealed = jnp.clip((step - config.warmup_steps) / config.anneal_steps, 0.0, 1.0)
    return warmup * config.lr - (config.lr - config.end_lr) * 0.5 * (1 - jnp.cos(jnp.pi * annealed))


def make_optimizer(config: OptimizerConfig, axes: Params) -> optax.GradientTransformation:
    """Clip by global norm, direction, decay of matrices, schedule.

    `axes` are the parameters' dimension names: stacked layers do not make a bias a matrix.
    """
    matrices = map_axes(lambda names: len([name for name in names if name != "layers"]) > 1, axes)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        config.direction(axes),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
        optax.scale_by_learning_rate(lambda count: learning_rate(config, count)),
    )


def schedule_count(opt_state: Any) -> jax.Array:
    """Updates that the schedule has counted: steps less the skipped ones. Int32 scalar."""
    (state,) = [state for state in jax.tree.leaves(opt_state, is_leaf=_is_schedule) if _is_schedule(state)]
    return state.count


def restart_schedule(opt_state: Any) -> Any:
    """The optimizer state with its schedule at 0; Adam's moments and its own count stay, as in the original."""
    return jax.tree.map(
        lambda node: optax.ScaleByScheduleState(jnp.zeros_like(node.count)) if _is_schedule(node) else node,
        opt_state,
        is_leaf=_is_schedule,
    )


def moments(opt_state: Any) -> dict[str, Params]:
    """Adam's averages {"mu": ..., "nu": ...} of an optimizer state, abstract or not."""
    (adam,) = [state for state in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(state)]
    return {"mu": adam.mu, "nu": adam.nu}


def with_moments(opt_state: Any, averages: dict[str, Params], adam_count: jax.Array, count: jax.Array) -> Any:
    """The optimizer state with Adam's averages and count, and the schedule's count, replaced."""

    def replaced(node: Any) -> Any:
        if _is_adam(node):
            return optax.ScaleByAdamState(adam_count, averages["mu"], averages["nu"])
        return optax.ScaleByScheduleState(count) if _is_schedule(node) else node

    return jax.tree.map(replaced, opt_state, is_leaf=lambda node: _is_adam(node) or _is_schedule(node))


def _is_adam(node: Any) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def _is_schedule(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)
