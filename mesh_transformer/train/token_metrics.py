"""Metrics of a microbatch in which only some targets are learned, and of its sources: sums, so that a step has the mean
over its learned targets, however they are spread over the microbatches.

Shapes: B sequences of a microbatch, T positions, S sources.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.models.head import TokenLoss
from mesh_transformer.train.batch import Batch
from mesh_transformer.train.schedule import Metrics

Sums = dict[str, jax.Array]
"""Sums over the targets or the sequences of a microbatch or of a step, float32."""


class Scored(NamedTuple):
    """What `Parts.loss` yields for the metrics: arrays (B, T)."""

    losses: TokenLoss
    # as in `Batch`
    learned: jax.Array | None
    sources: jax.Array | None

    @classmethod
    def of(cls, losses: TokenLoss, batch: Batch) -> Scored:
        """The losses of a microbatch."""
        return cls(losses, batch.learned, batch.sources)

    @property
    def counted(self) -> jax.Array:
        """float32 (B, T): 1 for a learned target, else 0."""
        return jnp.ones(self.losses.nll.shape) if self.learned is None else self.learned.astype(jnp.float32)


def of_microbatch(scored: Scored, z_loss_BT: jax.Array, order: np.ndarray | None, sources: int) -> tuple[Metrics, Sums]:
    """The metrics of a microbatch, and sums for `of_step`. The loss of a last target includes the mean z-loss of the
    learned targets of its sequence.

    Args:
        order: `Partition.sequence_order`.
        sources: S; 0: no sums by source.
    """
    by_source = source_sums(scored, sources) if sources else {}
    if scored.learned is None:
        last_loss = _last(scored.losses.nll, order) + z_loss_BT.mean(-1)
        return {"train/last_loss": last_loss.mean()}, by_source
    counted_BT, last_BT = scored.counted, _last_learned(scored.learned, order)
    z_loss_B = (z_loss_BT * counted_BT).sum(1) / jnp.maximum(counted_BT.sum(1), 1)
    last_loss = (scored.losses.nll * last_BT).sum() + z_loss_B.sum()
    return {}, {"last_loss": last_loss, "last_targets": last_BT.sum(), **by_source}


def of_step(sums: Sums) -> Metrics:
    """The metrics of a step, from its sums."""
    if "last_loss" not in sums:
        return sums
    by_source = {name: value for name, value in sums.items() if name.startswith("source_")}
    return {"train/last_loss": sums["last_loss"] / jnp.maximum(sums["last_targets"], 1), **by_source}


def of_evaluation(scored: Scored, order: np.ndarray | None) -> Metrics:
    """The metrics of an evaluation besides the loss: means over the learned targets, and their number."""
    nll, correct, counted = scored.losses.nll, scored.losses.correct, scored.counted
    if scored.learned is None:
        found = {"last_loss": _last(nll, order).mean(), "accuracy": correct.mean()}
    else:
        found = {"last_loss": _mean(nll, _last_learned(scored.learned, order)), "accuracy": _mean(correct, counted)}
    return {**found, "tokens": counted.sum()}


def source_sums(scored: Scored, sources: int) -> Sums:
    """The sum of the losses of the learned targets of each source, and their number, (S,) each."""
    if scored.sources is None:
        return {}
    own_SBT = scored.sources[None] == jnp.arange(sources)[:, None, None]
    counted_SBT = jnp.where(own_SBT, scored.counted[None], 0)
    return {
        "source_nll": (counted_SBT * scored.losses.nll[None]).sum((1, 2)),
        "source_tokens": counted_SBT.sum((1, 2)),
    }


def _last_learned(learned_BT: jax.Array, order: np.ndarray | None) -> jax.Array:
    """float32 (B, T): 1 for the last learned target of a sequence, else 0."""
    places_T = jnp.arange(learned_BT.shape[1]) if order is None else jnp.asarray(order)
    found_BT = jnp.where(learned_BT, places_T[None], -1)
    return (learned_BT & (found_BT == found_BT.max(1, keepdims=True))).astype(jnp.float32)


def _last(x_BT: jax.Array, order: np.ndarray | None) -> jax.Array:
    """The last position of each sequence, (B,)."""
    return x_BT[:, -1 if order is None else int(order.argmax())]


def _mean(values_BT: jax.Array, counted_BT: jax.Array) -> jax.Array:
    """The mean of the values that count; 0 if none does."""
    return (values_BT.astype(jnp.float32) * counted_BT).sum() / jnp.maximum(counted_BT.sum(), 1)
