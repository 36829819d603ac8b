"""The batch of a training step, as the schedules read it.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from mesh_transformer.errors import UserError
from mesh_transformer.ops.attend import context
from mesh_transformer.sequences import Sequences
from mesh_transformer.spec import Decoder


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
    """`Dropout.noise_BT2`; None: no dropout."""
    learned: jax.Array | None = None
    """bool: whether the loss counts a target; None: all."""
    segments: jax.Array | None = None
    """int32: the document of each token, 0 for padding, which sees and is seen by padding only; None: a sequence is one
    document."""
    positions: jax.Array | None = None
    """int32: the position of each token in its document; None: in its sequence."""
    sources: jax.Array | None = None
    """int32: the source of each sequence, at each of its positions; None: there is one source."""

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
    """Sequences, or int32 tokens of which each sequence is one document whose tokens are all learned."""
    return given if isinstance(given, Sequences) else Sequences(given)


def check_documents(decoder: Decoder, sequences: Sequences) -> None:
    """Raise UserError if a model cannot have documents in its sequences, and these have some."""
    if sequences.documents is not None and decoder.relative_bias:
        raise UserError(
            'model.pe "t5" cannot train on records with several documents: its bias of attention does not begin anew '
            "in each. Set data.packing=concat to ignore the documents, or use another model.pe"
        )


def learned_targets(sequences: Sequences) -> jax.Array | None:
    """Whether the loss counts the target of each position, bool (..., T); None: all.

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
