"""Exercises of chapter 7: pipelines. Fill in the functions, then run `python scripts/guide.py check 7`."""

from collections.abc import Callable

import jax

Layers = Callable[[jax.Array], jax.Array]


def tick(
    layers: Layers, microbatches: jax.Array, arrived: jax.Array, t: jax.Array, stages: int
) -> tuple[jax.Array, jax.Array]:
    """One tick of GPipe's forward pass, on one stage. It runs inside of a `shard_map` over the axis "pp".

    All stages run this function. The number of the stage is an array, known only on the device: use `jnp.where`, and
    not `if`.

    Args:
        layers: what this stage computes, from an array (B, D) to an array (B, D).
        microbatches: the inputs of all microbatches, (M, B, D), on every stage.
        arrived: what the stage before has sent in the tick before, (B, D). On the first stage it has no meaning.
        t: the number of the tick, from 0 to M + stages - 2. After the first M ticks there is no new microbatch: the
            first stage may compute any.
        stages: the number of stages.

    Returns:
        first, what this stage receives for the next tick; second, what it has computed in this one. Both (B, D).
    """
    raise NotImplementedError


def tied_gradient(of_embedding: jax.Array, of_head: jax.Array, stages: int) -> jax.Array:
    """The gradient of a table that is both the embedding and the head. It runs inside of a `shard_map` over "pp".

    The embedding is used by the first stage, the head by the last one. All stages run this function, and all must
    return the same array.

    Args:
        of_embedding: the table's gradient as the embedding. Only the first stage has it; the others have any numbers.
        of_head: the table's gradient as the head. Only the last stage has it; the others have any numbers.
        stages: the number of stages.
    """
    raise NotImplementedError


def item(t: int, stage: int, stages: int, rounds: int, microbatches: int) -> tuple[int, int] | None:
    """What a stage computes forward in tick t of interleaved 1F1B: (microbatch, round); None: it is idle.

    Microbatches, rounds and virtual stages are numbered from 0. Virtual stage c is on stage c mod p in round c div p,
    where p is the number of stages. In a tick a stage computes one virtual stage. The first p microbatches go through
    all rounds before the next p microbatches begin; `microbatches` is divisible by p. Stage 0 begins in tick 0, and
    each stage begins one tick after the stage before it.
    """
    raise NotImplementedError


def kept(stage: int, stages: int, microbatches: int) -> int:
    """The most microbatches that a stage keeps in 1F1B, with the clock of this library.

    A microbatch is kept from the tick of its forward pass to the tick of its backward pass, both included. A step may
    have any number of microbatches, also fewer than stages.
    """
    raise NotImplementedError
