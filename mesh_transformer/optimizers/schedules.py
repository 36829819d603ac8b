"""Schedules of the learning rate. Each is a function and a row of the table.

All rise linearly from 0 to lr over the first warmup_steps. With warmup_steps 0 the first update has the peak, lr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import jax

Decay = Literal["linear", "sqrt"]


class ScheduleFields(NamedTuple):
    """The fields of `OptimizerConfig` that a schedule may read."""

    lr: float
    end_lr: float
    warmup_steps: float
    anneal_steps: float
    total_steps: int
    decay_steps: float
    decay: Decay


class LearningRateSchedule(NamedTuple):
    """The learning rate after the warm-up."""

    below: Callable[[ScheduleFields, jax.Array], jax.Array | float]
    """(fields, float32 step) -> by how much the learning rate is below lr, float32."""
    reads: frozenset[str] = frozenset()
    """The names of `FIELDS` that it reads."""


FIELDS = frozenset({"end_lr", "anneal_steps", "decay_steps", "decay"})
"""The fields that some schedules do not read."""


def learning_rate(schedule: LearningRateSchedule, rates: ScheduleFields, step: jax.Array) -> jax.Array:
    """The learning rate after `step` updates, float32."""
    import jax.numpy as jnp

    step = jnp.asarray(step, jnp.float32)
    warmup = jnp.minimum(step / rates.warmup_steps, 1.0) if rates.warmup_steps else 1.0
    return jnp.asarray(warmup * rates.lr - schedule.below(rates, step), jnp.float32)


def _cosine(rates: ScheduleFields, step: jax.Array) -> jax.Array:
    """From lr to end_lr over anneal_steps, as half a period of a cosine (Loshchilov and Hutter 2017,
    arXiv:1608.03983)."""
    import jax.numpy as jnp

    return (rates.lr - rates.end_lr) * 0.5 * (1 - jnp.cos(jnp.pi * _annealed(rates, step)))


def _linear(rates: ScheduleFields, step: jax.Array) -> jax.Array:
    """From lr to end_lr over anneal_steps."""
    return (rates.lr - rates.end_lr) * _annealed(rates, step)


def _constant(rates: ScheduleFields, step: jax.Array) -> float:
    return 0.0


def _wsd(rates: ScheduleFields, step: jax.Array) -> jax.Array:
    """Warm-up, stable, decay: lr, and over the last steps of the run down to end_lr (Hu et al. 2024, arXiv:2404.06395).

    The decay by a square root is from Hägele et al. 2024, arXiv:2405.18392.
    """
    import jax.numpy as jnp

    decayed = jnp.clip((step - (rates.total_steps - rates.decay_steps)) / rates.decay_steps, 0.0, 1.0)
    return (rates.lr - rates.end_lr) * (jnp.sqrt(decayed) if rates.decay == "sqrt" else decayed)


def _annealed(rates: ScheduleFields, step: jax.Array) -> jax.Array:
    """The share of anneal_steps, after the warm-up, that is over."""
    import jax.numpy as jnp

    return jnp.clip((step - rates.warmup_steps) / rates.anneal_steps, 0.0, 1.0)


SCHEDULES = {
    "cosine": LearningRateSchedule(_cosine, frozenset({"end_lr", "anneal_steps"})),
    "linear": LearningRateSchedule(_linear, frozenset({"end_lr", "anneal_steps"})),
    "constant": LearningRateSchedule(_constant),
    "wsd": LearningRateSchedule(_wsd, frozenset({"end_lr", "decay_steps", "decay"})),
}
"""By the value of `optimizer.schedule`."""
