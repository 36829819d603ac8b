"""Rotary position encoding (Su et al. 2021, arXiv:2104.09864), interleaved as in GPT-J.

Shapes: B sequences, T positions, H heads, K dims of a head, R rotary dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def angles(n_positions: int, rotary_dims: int) -> tuple[np.ndarray, np.ndarray]:
    """Sines and cosines, each (n_positions, R / 2) float32, of position * 10000^(-2i / R).

    Computed in float64 and rounded once, as the original does.
    """
    frequencies = 10000.0 ** (-np.arange(0, rotary_dims, 2) / rotary_dims)
    theta = np.arange(n_positions)[:, None] * frequencies
    return np.sin(theta).astype(np.float32), np.cos(theta).astype(np.float32)


def rotate(x_BTHK: jax.Array, sin_BTR: jax.Array, cos_BTR: jax.Array) -> jax.Array:
    """Turn the pairs (0, 1), (2, 3), ... of the first R dims of each head by their position's angles.

    `sin_BTR` and `cos_BTR` hold R / 2 angles a position; the batch dimension may be 1. Float32 inside, the
    result has x's dtype.
    """
    rotary_dims = 2 * sin_BTR.shape[-1]
    head = x_BTHK[..., :rotary_dims].astype(jnp.float32)
    even, odd = head[..., ::2], head[..., 1::2]
    sin, cos = sin_BTR[:, :, None, :], cos_BTR[:, :, None, :]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(head.shape)
    return jnp.concatenate([turned.astype(x_BTHK.dtype), x_BTHK[..., rotary_dims:]], axis=-1)
