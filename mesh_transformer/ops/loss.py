"""Cross-entropy over a vocabulary that may be sharded. B sequences, T positions, V vocabulary rows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLoss(NamedTuple):
    """Per-token results, each (B, T)."""

    nll: jax.Array  # float32, nats
    log_z: jax.Array  # float32, log of the softmax's normaliser
    shifted_log_z: (
        jax.Array
    )  # float32, the same after subtracting the largest logit: the classic z-loss's term
    correct: jax.Array  # bool: the target has the largest logit


def token_loss(logits_BTV: jax.Array, targets_BT: jax.Array) -> TokenLoss:
    """Softmax cross-entropy of float32 logits; rows at -inf take no part.

    The target's logit is a masked sum, not a gather, so that logits stay sharded over the vocabulary.
    """
    largest = jax.lax.stop_gradient(logits_BTV.max(-1, keepdims=True))
    shifted = logits_BTV - largest
    shifted_log_z = jnp.log(jnp.exp(shifted).sum(-1))
    rows = jax.lax.broadcasted_iota(targets_BT.dtype, shifted.shape, 2)
    target = jnp.where(rows == targets_BT[..., None], shifted, 0).sum(-1)
    return TokenLoss(shifted_log_z - target, shifted_log_z + largest[..., 0], shifted_log_z, target == 0)
