"""The batch of a training step, as the schedules read it, and its metrics.

Where only some targets are learned, the metrics of a microbatch are sums, and metrics by source are always sums. So a
step has the mean over its learned targets, however they are spread over the microbatches.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions, S sources.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.errors import UserError
from mesh_transformer.models.head import TokenLoss
from mesh_transformer.ops.attend import context
from mesh_transformer.sequences import Sequences
from mesh_transformer.spec import Decoder
from mesh_transformer.train.schedule import Metrics


class Batch(NamedTuple):
    """The batch of a step, each array (A, B, T); or one microbatch, (B, T).

    The positions are in the order of `Partition.sequence_order`.
    """

    tokens: jax.Array  # int32
    targets: jax.Array  # int32
    weights: jax.Array
    """float32: the weight of each target's loss. All weights sum to A, or are 0 if no target is learned. The sum of
    weighted losses, divided by A, is therefore the mean over all learned targets, however they are spread over the
    microbatches. Where each replica computes its part of B on its own, the weights sum to A times the replicas."""
    noise: jax.Array | None = None
    """`Dropout.noise_BT2`, or None without dropout."""
    learned: jax.Array | None = None
    """bool: whether the loss counts a target, or None if it counts all."""
    segments: jax.Array | None = None
    """int32: the document of each token, 0 for padding, which sees and is seen by padding only; None if a sequence is
    one document."""
    positions: jax.Array | None = None
    """int32: the position of each token in its document, or None for its position in the sequence."""
    sources: jax.Array | None = None
    """int32: the source of each sequence, at each of its positions; None with one source."""

    @classmethod
    def of(cls, sequences: Sequences, replicas: int = 1, noise_ABT2: jax.Array | None = None) -> Self:
        """A batch of sequences (A, B, T + 1) or (B, T + 1). `replicas` compute their parts of B on their own."""
        tokens, targets = sequences.tokens[..., :-1], sequences.tokens[..., 1:]
        learned, segments, positions, sources = learned_targets(sequences), None, None, None
        if sequences.documents is not None:
            segments = sequences.documents[..., :-1]
            positions = positions_in_documents(segments)
        if sequences.sources is not None:
            sources = jnp.broadcast_to(sequences.sources[..., None], targets.shape)
        order = context.order(tokens.shape[-1])
        if order is not None:
            tokens, targets = tokens[..., order], targets[..., order]
            noise_ABT2 = None if noise_ABT2 is None else noise_ABT2[..., order, :]
            learned, segments, positions = (
                None if x is None else x[..., order] for x in (learned, segments, positions)
            )
        weights = _weights(targets.shape, learned, replicas)
        return cls(tokens, targets, weights, noise_ABT2, learned, segments, positions, sources)


def as_sequences(given: Sequences | jax.Array) -> Sequences:
    """The argument as `Sequences`. Each sequence of plain int32 tokens is one document, and all tokens are learned."""
    return given if isinstance(given, Sequences) else Sequences(given)


def check_documents(decoder: Decoder, sequences: Sequences) -> None:
    """Raise UserError if a model cannot have documents in its sequences, and these have some."""
    if sequences.documents is not None and decoder.relative_bias:
        raise UserError(
            'model.pe "t5" cannot train on records with several documents: its bias of attention does not begin anew '
            "in each. Set data.packing=concat to ignore the documents, or use another model.pe"
        )


def learned_targets(sequences: Sequences) -> jax.Array | None:
    """Whether the loss counts the target of each position, bool (..., T); None if it counts all.

    A target counts if it is learned, and is a token of the document of the token before it.
    """
    learned = None if sequences.learned is None else sequences.learned[..., 1:]
    if sequences.documents is None:
        return learned
    before, after = sequences.documents[..., :-1], sequences.documents[..., 1:]
    inside = (before == after) & (after > 0)
    return inside if learned is None else inside & learned


def positions_in_documents(documents: jax.Array) -> jax.Array:
    """The position of each token in its document, from 0: int32 (..., T), given the document of each token, which
    follow one another."""
    places = jax.lax.broadcasted_iota(jnp.int32, documents.shape, documents.ndim - 1)
    begins = documents[..., 1:] != documents[..., :-1]
    starts = jnp.where(begins, places[..., 1:], 0)
    starts = jnp.concatenate([jnp.zeros_like(places[..., :1]), starts], axis=-1)
    return places - jax.lax.cummax(starts, axis=starts.ndim - 1)


def _weights(shape: tuple[int, ...], learned: jax.Array | None, replicas: int) -> jax.Array:
    """`Batch.weights` for targets of this shape."""
    if learned is None:
        return jnp.full(shape, replicas / (shape[-1] * shape[-2]))
    # in whole numbers: float32 counts to 2^24
    count = jnp.maximum(learned.sum(dtype=jnp.int32), 1).astype(jnp.float32)
    return learned.astype(jnp.float32) * (math.prod(shape[:-2]) * replicas / count)


Sums = dict[str, jax.Array]
"""Sums over the targets or the sequences of a microbatch or of a step, float32."""


class Scored(NamedTuple):
    """The results of `ModelFunctions.loss` for the metrics: arrays (B, T)."""

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


def microbatch_metrics(
    scored: Scored, z_loss_BT: jax.Array, order: np.ndarray | None, sources: int
) -> tuple[Metrics, Sums]:
    """The metrics of a microbatch, and sums for `step_metrics`. The loss of a last target includes the mean z-loss of
    the learned targets of its sequence.

    Args:
        order: `Partition.sequence_order`.
        sources: S, or 0 for no sums by source.
    """
    by_source = source_sums(scored, sources) if sources else {}
    if scored.learned is None:
        last_loss = _last(scored.losses.nll, order) + z_loss_BT.mean(-1)
        return {"train/last_loss": last_loss.mean()}, by_source
    counted_BT, last_BT = scored.counted, _last_learned(scored.learned, order)
    z_loss_B = (z_loss_BT * counted_BT).sum(1) / jnp.maximum(counted_BT.sum(1), 1)
    last_loss = (scored.losses.nll * last_BT).sum() + z_loss_B.sum()
    return {}, {"last_loss": last_loss, "last_targets": last_BT.sum(), **by_source}


def step_metrics(sums: Sums) -> Metrics:
    """The metrics of a step, from its sums."""
    if "last_loss" not in sums:
        return sums
    by_source = {name: value for name, value in sums.items() if name.startswith("source_")}
    return {"train/last_loss": sums["last_loss"] / jnp.maximum(sums["last_targets"], 1), **by_source}


def evaluation_metrics(scored: Scored, order: np.ndarray | None) -> Metrics:
    """The metrics of an evaluation besides the loss: means over the learned targets, and their number."""
    nll, correct, counted = scored.losses.nll, scored.losses.correct, scored.counted
    if scored.learned is None:
        metrics = {"last_loss": _last(nll, order).mean(), "accuracy": correct.mean()}
    else:
        metrics = {"last_loss": _mean(nll, _last_learned(scored.learned, order)), "accuracy": _mean(correct, counted)}
    return {**metrics, "tokens": counted.sum()}


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
