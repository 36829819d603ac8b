"""Exercises of chapter 8: experts and latent attention. Fill in the functions, then run
`python scripts/guide.py check 8`."""

from collections.abc import Callable

import jax


def places(experts: jax.Array, count: int) -> jax.Array:
    """The place of each choice in the queue of its expert: 0 for the first choice of an expert, 1 for its second.

    Args:
        experts: int32 (M,): the expert of each choice, from 0 to count - 1. Earlier choices come first.
        count: the number of experts.

    Returns:
        int32 (M,).
    """
    raise NotImplementedError


def balance_loss(logits: jax.Array, chosen: int) -> jax.Array:
    """The balance loss of a softmax router: E x the sum over the experts of f_e P_e.

    f_e is the share of all choices that expert e has, and P_e the mean of its scores. f_e has no gradient. The check
    compares the value and the gradient by `logits`.

    Args:
        logits: float32 (N, E).
        chosen: the number of experts that a token chooses.
    """
    raise NotImplementedError


def exchange(buffer: jax.Array, compute: Callable[[jax.Array], jax.Array], devices: int) -> jax.Array:
    """Send rows to the devices of their experts, compute there, and send the results back. It runs inside of a
    `shard_map` over the axis "ep".

    Args:
        buffer: (E, C, D): this device's rows for each of all E experts.
        compute: what this device's E / devices experts compute: (E / devices, R, D) -> the same shape, for any R. Entry
            e of the first dimension has the rows of this device's expert e.
        devices: the number of devices. Device 0 has the first E / devices experts.

    Returns:
        (E, C, D): the results, in the places of the rows.
    """
    raise NotImplementedError


def latent_scores(q: jax.Array, latents: jax.Array, keys: jax.Array) -> jax.Array:
    """The products of one query with the keys of all positions, (H, T), without making the keys.

    Args:
        q: (H, d).
        latents: (T, r).
        keys: (H, r, d): the matrices that make the keys of the heads from a latent.
    """
    raise NotImplementedError
