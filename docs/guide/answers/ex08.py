"""Answers to the exercises of chapter 8."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def places(experts: jax.Array, count: int) -> jax.Array:
    """The number of earlier choices of the same expert."""
    chosen = jax.nn.one_hot(experts, count, dtype=jnp.int32)
    return (chosen * chosen.cumsum(0)).sum(1) - 1


def balance_loss(logits: jax.Array, chosen: int) -> jax.Array:
    """The choice has no gradient by itself: it is made of integers."""
    scores, experts = jax.nn.softmax(logits), logits.shape[1]
    choices = jax.lax.top_k(scores, chosen)[1]
    shares = jax.nn.one_hot(choices, experts).mean((0, 1))
    return experts * (shares * scores.mean(0)).sum()


def exchange(buffer: jax.Array, compute: Callable[[jax.Array], jax.Array], devices: int) -> jax.Array:
    """An all-to-all, the experts, and the same all-to-all."""
    rows, width = buffer.shape[1:]
    received = jax.lax.all_to_all(buffer.reshape(devices, -1, rows, width), "ep", 0, 0)
    # (devices, E / devices, C, D) -> (E / devices, devices C, D)
    of_expert = received.swapaxes(0, 1).reshape(-1, devices * rows, width)
    y = compute(of_expert).reshape(-1, devices, rows, width).swapaxes(0, 1)
    return jax.lax.all_to_all(y, "ep", 0, 0).reshape(buffer.shape)


def latent_scores(q: jax.Array, latents: jax.Array, keys: jax.Array) -> jax.Array:
    """The matrices are multiplied into the query."""
    return jnp.einsum("hd,hrd->hr", q, keys) @ latents.T
