"""Answers to the exercises of chapter 7."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Layers = Callable[[jax.Array], jax.Array]


def tick(
    layers: Layers, microbatches: jax.Array, arrived: jax.Array, t: jax.Array, stages: int
) -> tuple[jax.Array, jax.Array]:
    """Stage 0 takes a microbatch, each other stage what has arrived."""
    # after the last microbatch, stage 0 computes any one: nobody uses the result
    own = microbatches[jnp.clip(t, 0, len(microbatches) - 1)]
    y = layers(jnp.where(jax.lax.axis_index("pp") == 0, own, arrived))
    return jax.lax.ppermute(y, "pp", [(stage, stage + 1) for stage in range(stages - 1)]), y


def tied_gradient(of_embedding: jax.Array, of_head: jax.Array, stages: int) -> jax.Array:
    """Each stage gives what is meaningful on it, and all take the sum."""
    stage = jax.lax.axis_index("pp")
    # with one stage, it is both the first and the last
    part = jnp.where(stage == 0, of_embedding, 0) + jnp.where(stage == stages - 1, of_head, 0)
    return jax.lax.psum(part, "pp")


def item(t: int, stage: int, stages: int, rounds: int, microbatches: int) -> tuple[int, int] | None:
    """The stage's work in order: p microbatches in round 0, the same p in round 1, and so on."""
    number = t - stage
    if not 0 <= number < microbatches * rounds:
        return None
    turn, first = divmod(number % (stages * rounds), stages)
    return number // (stages * rounds) * stages + first, turn


def kept(stage: int, stages: int, microbatches: int) -> int:
    """From tick i + s to tick i + (p - 1) + (p - 1 - s), one new microbatch in each tick."""
    return min(2 * (stages - 1 - stage) + 1, microbatches)
