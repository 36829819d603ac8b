"""Choosing the next token. B sequences, V vocabulary rows; each option is a vector, one value a sequence."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class SamplingOptions(NamedTuple):
    """How each of B sequences is sampled."""

    temperature_B: jax.Array  # float32; 0 is greedy
    top_p_B: jax.Array  # float32 in (0, 1]; 1 keeps everything
    top_k_B: jax.Array  # int32; 0 keeps everything

    @classmethod
    def same(cls, n: int, temperature: float, top_p: float, top_k: int) -> SamplingOptions:
        """The same options for `n` sequences."""
        return cls(
            jnp.full((n,), temperature, jnp.float32),
            jnp.full((n,), top_p, jnp.float32),
            jnp.full((n,), top_k, jnp.int32),
        )


def sample(logits_BV: jax.Array, keys_B: jax.Array, options: SamplingOptions) -> jax.Array:
    """One token a sequence, (B,) int32: temperature, then top-k, then top-p (Holtzman et al. 2020), then a draw.

    Temperature 0 takes the largest logit. Rows at -inf are never drawn.
    """
    greedy = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    temperature = jnp.where(options.temperature_B > 0, options.temperature_B, 1.0)[:, None]
    kept = keep_most_likely(logits_BV / temperature, options.top_k_B, options.top_p_B)
    drawn = jax.vmap(jax.random.categorical)(keys_B, kept).astype(jnp.int32)
    return jnp.where(options.temperature_B > 0, drawn, greedy)


def keep_most_likely(logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Logits with everything but the top k, and of those the smallest set of probability top_p, at -inf.

    The most likely token always stays. Tokens that tie with the last kept one stay too.
    """
    descending = -jnp.sort(-logits_BV, axis=-1)
    rank = jnp.arange(logits_BV.shape[-1])
    top_k = jnp.where(top_k_B > 0, top_k_B, logits_BV.shape[-1])[:, None]
    descending = jnp.where(rank < top_k, descending, -jnp.inf)
    probabilities = jax.nn.softmax(descending, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    kept = (before < top_p_B[:, None]) & (rank < top_k) | (rank == 0)
    smallest = jnp.where(kept, descending, jnp.inf).min(-1, keepdims=True)
    return jnp.where(logits_BV >= smallest, logits_BV, -jnp.inf)
