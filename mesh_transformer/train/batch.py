"""The batch of a training step, as the schedules read it.

Shapes: A microbatches, B sequences of a microbatch over the whole mesh, T positions.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import jax
import jax.numpy as jnp

from mesh_transformer.ops.attend import context
from mesh_transformer.sequences import Sequences


class Batch(NamedTuple):
    """The batch of a step, each array (A, B, T); or one microbatch, (B, T).

    The positions are in the order of `Partition.sequence_order`.
    """

    tokens: jax.Array  # int32
    targets: jax.Array  # int32
    weights: jax.Array
    """float32: the weight of each target's loss. All weights sum to A. The sum of weighted losses, divided by A, is
    therefore the weighted mean over all tokens, however they are spread over the microbatches. Where each replica
    computes its part of B on its own, the weights of each part sum to A."""
    noise: jax.Array | None = None
    """`Dropout.noise_BT2`; None: no dropout."""

    @classmethod
    def of(cls, sequences: Sequences, replicas: int = 1, noise_ABT2: jax.Array | None = None) -> Self:
        """A batch of sequences (A, B, T + 1) or (B, T + 1) with equal weights. `replicas` compute their parts of B
        on their own."""
        tokens, targets = sequences.tokens[..., :-1], sequences.tokens[..., 1:]
        order = context.order(tokens.shape[-1])
        if order is not None:
            tokens, targets = tokens[..., order], targets[..., order]
            noise_ABT2 = None if noise_ABT2 is None else noise_ABT2[..., order, :]
        weights = jnp.full(targets.shape, replicas / (targets.shape[-1] * targets.shape[-2]))
        return cls(tokens, targets, weights, noise_ABT2)


def as_sequences(given: Sequences | jax.Array) -> Sequences:
    """Sequences, or int32 tokens of which each sequence is one document whose tokens are all learned."""
    return given if isinstance(given, Sequences) else Sequences(given)
