"""Exercises of chapter 6, context parallelism. Fill in the functions, then run: python scripts/guide.py check 6"""

import jax
import numpy as np

State = tuple[jax.Array, jax.Array, jax.Array]
"""What some keys add to the C queries of a device: m and z (H, C, 1), o (H, C, K), as in the chapter."""


def merge_outputs(y1: jax.Array, log_z1: jax.Array, y2: jax.Array, log_z2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge what attention kernels return.

    A kernel returns the finished output of a block of keys, y = o / z (H, C, K), and the logarithm of its normalizer,
    log_z = m + log z (H, C, 1). Return y and log_z of two blocks together. The scores may be around 1,000: no
    exponential may overflow.
    """
    raise NotImplementedError


def last_hop(state: State, q: jax.Array, k: jax.Array, v: jax.Array, axis: str, n: int) -> jax.Array:
    """Write the ring's last hop.

    It runs inside a `shard_map` on each of n devices of the mesh axis `axis`. A device holds consecutive positions.
    `state` has the blocks of its own keys and of the keys of n - 2 hops. `k` and `v` (H, C, K) are the keys and values
    that arrived with the last of these hops; each hop sends them to the next device. Fetch the keys that are missing,
    merge their block, and return the output of the device's queries `q` (H, C, K), causal, scores scaled by K ** -0.5.
    """
    raise NotImplementedError


def zigzag_order(length: int, n: int) -> np.ndarray:
    """The order of zigzag.

    Return the positions 0 ... length - 1 in the order in which n devices hold them, so that an equal split of the
    result gives device i the chunks i and 2 n - 1 - i of 2 n equal chunks, the early one first. 2 n divides `length`.
    """
    raise NotImplementedError
