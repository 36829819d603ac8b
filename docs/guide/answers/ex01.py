"""Our answers to the exercises of chapter 1."""

import jax
import jax.numpy as jnp
import numpy as np


def rotate_halves(x_BTHK, positions_T, base):
    """The split and the join change: two halves instead of every second number."""
    K = x_BTHK.shape[-1]
    angles_TK = positions_T[:, None] * base ** (-np.arange(0, K, 2) / K)
    cos, sin = jnp.cos(angles_TK)[None, :, None], jnp.sin(angles_TK)[None, :, None]
    a, b = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def grouped_attention(q_BTHK, k_BTJK, v_BTJK):
    """G = H / J is a dimension of the queries and of the output only."""
    B, T, H, K = q_BTHK.shape
    q_BTJGK = q_BTHK.reshape(B, T, k_BTJK.shape[2], -1, K)
    scores_BJGTS = jnp.einsum("btjgk,bsjk->bjgts", q_BTJGK, k_BTJK) / np.sqrt(K)
    seen_TS = jnp.tril(jnp.ones((T, T), bool))[None, None, None]
    weights_BJGTS = jax.nn.softmax(jnp.where(seen_TS, scores_BJGTS, -jnp.inf))
    return jnp.einsum("bjgts,bsjk->btjgk", weights_BJGTS, v_BTJK).reshape(B, T, H, K)


def bits_per_byte(logits_BTV, targets_BT, bytes_V):
    """The bits of the whole text, divided by the bytes of the whole text.

    A mean of ratios weighs a token of one byte as much as a token of ten, so it is not the size of any compressed file.
    """
    log_p_BT = jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), targets_BT[..., None], axis=-1)
    return -log_p_BT.sum() / np.log(2) / jnp.asarray(bytes_V)[targets_BT].sum()


def layer_intensity(D, F, tokens):
    """2 FLOPs for each element of a matrix and token; 4 bytes for each number that is read or written.

    Each number of the inputs and outputs is used for D or F products, so a wide layer has a high intensity.
    """
    elements = 4 * D * D + 2 * D * F
    inputs, outputs = D + D + D + F, 3 * D + D + F + D
    return 2 * elements * tokens, 4 * (elements + (inputs + outputs) * tokens)
