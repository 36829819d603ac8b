"""Position encodings of attention: rotary (Su et al. 2021, arXiv:2104.09864) with its extensions to longer contexts,
and ALiBi (Press et al. 2021, arXiv:2108.12409). `ENCODINGS` is the table of their computations.

Shapes: B sequences, T positions, H heads of queries, J heads of keys, K dims of a head, R rotated dims.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer.parallel.sharding import platform
from mesh_transformer.spec import Alibi, PositionEncoding, Rotary, Scaling

# bfloat16 has all whole numbers up to it
DIGIT = 256


class Rotation(NamedTuple):
    """The angles of each position: sines and cosines, float32 (B, T, R / 2), or (B, T, H, R / 2) where heads have
    different ones. B may be 1."""

    sin_BTR: jax.Array
    cos_BTR: jax.Array


def rotation(rotary: Rotary, positions_BT: jax.Array, n_positions: int) -> Rotation:
    """The angles (position + first) * frequency of int32 positions below `n_positions`.

    In float32 they are computed from the positions, as transformers does. In float64, as the original GPT-J has them,
    they are looked up in tables.
    """
    positions_BT = positions_BT + rotary.first
    if rotary.precision == "float64":
        theta = np.arange(n_positions + rotary.first, dtype=np.float64)[:, None] * frequencies(rotary)
        sin, cos = (jnp.asarray(table.astype(np.float32)) for table in (np.sin(theta), np.cos(theta)))
        return Rotation(sin[positions_BT], cos[positions_BT])
    theta_BTR = positions_BT[..., None].astype(jnp.float32) * jnp.asarray(frequencies(rotary))[None, None]
    factor = rotary.scaling.attention_factor if rotary.scaling else 1.0
    return Rotation(jnp.sin(theta_BTR) * factor, jnp.cos(theta_BTR) * factor)


def _pairs(head_BTHR: jax.Array) -> Sequence[jax.Array]:
    return head_BTHR[..., ::2], head_BTHR[..., 1::2]


def _halves(head_BTHR: jax.Array) -> Sequence[jax.Array]:
    return jnp.split(head_BTHR, 2, axis=-1)


class _Style(NamedTuple):
    """A style of `Rotary`: a head -> the first and the second dims of all pairs; the inverse, up to a reshape; the
    numbers of pairs -> the indices of their first and second dims, (2, R / 2)."""

    split: Callable[[jax.Array], Sequence[jax.Array]]
    join: Callable[..., jax.Array]
    dims: Callable[[int], np.ndarray]


_STYLES = {
    "pairs": _Style(_pairs, jnp.stack, lambda pairs: np.arange(2 * pairs).reshape(pairs, 2).T),
    "halves": _Style(_halves, jnp.concatenate, lambda pairs: np.arange(2 * pairs).reshape(2, pairs)),
}


def rotate(x_BTHK: jax.Array, angles: Rotation, style: str) -> jax.Array:
    """Rotate pairs of the first R dims of each head by the angles of their position; see `Rotary`.

    The result has x's dtype; the arithmetic is float32.
    """
    if platform() == "tpu":
        return rotate_by_product(style, x_BTHK, *angles)
    return rotate_by_slices(style, x_BTHK, *angles)


def rotate_by_slices(style: str, x_BTHK: jax.Array, sin_BTR: jax.Array, cos_BTR: jax.Array) -> jax.Array:
    """`rotate`, with the dims of a pair taken apart."""
    rotary_dims = 2 * sin_BTR.shape[-1]
    head = x_BTHK[..., :rotary_dims].astype(jnp.float32)
    split, join, _ = _STYLES[style]
    first, second = split(head)
    sin, cos = (_of_heads(x, x_BTHK) for x in (sin_BTR, cos_BTR))
    rotated = first * cos - second * sin, second * cos + first * sin
    head = join(rotated, axis=-1).reshape(head.shape)
    return jnp.concatenate([head.astype(x_BTHK.dtype), x_BTHK[..., rotary_dims:]], axis=-1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rotate_by_product(style: str, x_BTHK: jax.Array, sin_BTR: jax.Array, cos_BTR: jax.Array) -> jax.Array:
    """`rotate`, as x cos + (x turn) sin: a product with a constant matrix moves each dim to the other of its pair.

    The product is exact, since a column of `turn` has one number, 1 or -1. A TPU multiplies matrices faster than it
    moves dims, for which it copies the heads into other tiles. The gradient is a rotation by the opposite angle, and
    the angles have none.
    """
    pairs, width = sin_BTR.shape[-1], x_BTHK.shape[-1]
    first, second = _STYLES[style].dims(pairs)
    turn = np.zeros((width, width), x_BTHK.dtype)
    turn[second, first], turn[first, second] = -1, 1
    # a TPU rounds float32 factors to bfloat16 otherwise
    exact = jax.lax.Precision.HIGHEST if x_BTHK.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    # One matrix for each head of each sequence: for a product of all rows with one matrix, XLA copies the heads into
    # rows. With one position there is nothing to copy.
    batch, length, heads, _ = x_BTHK.shape
    turns = jnp.broadcast_to(turn, (batch, heads, width, width)) if length > 1 else turn
    product = "bthk,bhkj->bthj" if length > 1 else "bthk,kj->bthj"
    turned = jnp.einsum(product, x_BTHK, turns, precision=exact).astype(jnp.float32)

    def of_dims(of_pairs: jax.Array, others: float) -> jax.Array:
        """Numbers of the pairs, repeated for both dims of a pair; `others` for the dims that are not rotated."""
        both = _STYLES[style].join([of_pairs, of_pairs], axis=-1).reshape(*of_pairs.shape[:-1], 2 * pairs)
        left = [(0, 0)] * (both.ndim - 1) + [(0, width - 2 * pairs)]
        return _of_heads(jnp.pad(both, left, constant_values=others), x_BTHK)

    return (x_BTHK.astype(jnp.float32) * of_dims(cos_BTR, 1) + turned * of_dims(sin_BTR, 0)).astype(x_BTHK.dtype)


def _rotate_by_product_forward(
    style: str, x_BTHK: jax.Array, sin_BTR: jax.Array, cos_BTR: jax.Array
) -> tuple[jax.Array, Rotation]:
    return rotate_by_product(style, x_BTHK, sin_BTR, cos_BTR), Rotation(sin_BTR, cos_BTR)


def _rotate_by_product_backward(style: str, angles: Rotation, dy_BTHK: jax.Array) -> tuple[jax.Array, None, None]:
    return rotate_by_product(style, dy_BTHK, -angles.sin_BTR, angles.cos_BTR), None, None


rotate_by_product.defvjp(_rotate_by_product_forward, _rotate_by_product_backward)


def _of_heads(of_positions: jax.Array, x_BTHK: jax.Array) -> jax.Array:
    """Numbers of positions, broadcast over the heads unless each head has its own."""
    return of_positions if of_positions.ndim == x_BTHK.ndim else of_positions[:, :, None, :]


def rotate_both(
    rotary: Rotary, q_BTHK: jax.Array, k_BTJK: jax.Array, of_queries: Rotation, of_keys: Rotation, scale: float
) -> tuple[jax.Array, jax.Array]:
    """See `Encoding`."""
    return rotate(q_BTHK, of_queries, rotary.style), rotate(k_BTJK, of_keys, rotary.style)


def frequencies(rotary: Rotary) -> np.ndarray:
    """The angle of each pair for one position, (R / 2,) rounded up, of the rotary's precision: base^(-2i / R), scaled.

    In float32 each operation rounds as in transformers, whose formulas these are: the difference of one ulp would be
    3e-4 of an angle after 6,000 positions.
    """
    exponents = np.arange(0, rotary.dims, 2, dtype=rotary.precision) / np.dtype(rotary.precision).type(rotary.dims)
    if rotary.base is None:
        return np.zeros_like(exponents)
    if rotary.precision == "float64":
        return rotary.base**-exponents
    # numpy's power of float32 is up to two ulps off; torch's is nearly always the rounded one
    powers = (rotary.base ** exponents.astype(np.float64)).astype(np.float32)
    scaling = rotary.scaling
    if scaling is None:
        return 1 / powers
    return _SCALED[scaling.kind](rotary, scaling, powers)


def _linear(_: Rotary, scaling: Scaling, powers_R: np.ndarray) -> np.ndarray:
    return 1 / powers_R / np.float32(scaling.factor)


def _llama3(_: Rotary, scaling: Scaling, powers_R: np.ndarray) -> np.ndarray:
    plain = 1 / powers_R
    wavelengths = np.float32(2 * math.pi) / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((scaling.original_seq / wavelengths - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - kept) * plain / np.float32(scaling.factor) + kept * plain


def _yarn(rotary: Rotary, scaling: Scaling, powers_R: np.ndarray) -> np.ndarray:
    first, last = (_pair_with_turns(rotary, scaling, turns) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary.dims - 1)
    # the ramp of one point has a width too
    width = last - first if last != first else 0.001
    pairs = np.arange(rotary.dims // 2, dtype=np.float32)
    kept = 1 - np.clip((pairs - np.float32(first)) / np.float32(width), 0, 1)
    return 1 / (np.float32(scaling.factor) * powers_R) * (1 - kept) + 1 / powers_R * kept


def _longrope(_: Rotary, scaling: Scaling, powers_R: np.ndarray) -> np.ndarray:
    return 1 / (np.asarray(scaling.factors, np.float32) * powers_R)


# the kinds of Scaling
_SCALED = {"linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def _pair_with_turns(rotary: Rotary, scaling: Scaling, turns: float) -> float:
    """The index of the pair, not a whole number, that makes `turns` turns in the original context."""
    assert rotary.base is not None
    length = scaling.original_seq / (turns * 2 * math.pi)
    return rotary.dims * math.log(length) / (2 * math.log(rotary.base))


class Digits(NamedTuple):
    """Each position, as high x DIGIT + low: float32 (B, T, 1) each. B may be 1."""

    high_BT1: jax.Array
    low_BT1: jax.Array


def digits(_: Alibi, positions_BT: jax.Array, n_positions: int) -> Digits:
    """The digits of int32 positions below `n_positions`."""
    high, low = jnp.divmod(positions_BT[..., None], DIGIT)
    return Digits(high.astype(jnp.float32), low.astype(jnp.float32))


def with_positions(
    _: Alibi, q_BTHK: jax.Array, k_BTJK: jax.Array, of_queries: Digits, of_keys: Digits, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys with two more dims, whose products, times `scale`, are slope x position of the key.

    As the softmax does not change when a number is added to all logits of a query, this is the slope times the
    distance. See `Encoding`.
    """
    batch, length, heads = q_BTHK.shape[:3]
    slopes = np.outer(alibi_slopes(heads), (DIGIT, 1)) / scale
    more_q = jnp.broadcast_to(jnp.asarray(slopes, q_BTHK.dtype), (batch, length, heads, 2))
    digits_BT12 = jnp.concatenate(of_keys, axis=-1)[:, :, None].astype(k_BTJK.dtype)
    more_k = jnp.broadcast_to(digits_BT12, (*k_BTJK.shape[:3], 2))
    return jnp.concatenate([q_BTHK, more_q], axis=-1), jnp.concatenate([k_BTJK, more_k], axis=-1)


def alibi_slopes(heads: int) -> list[float]:
    """A geometric series for a power of two, 2^(-8 / heads) and so on; for other numbers, the series of the next lower
    power, and every second number of the series of twice this power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]


EncodedPositions = Rotation | Digits
"""The arrays of an encoding, (B, T, ...), computed once for all layers. B may be 1."""


class Encoding(NamedTuple):
    """The computation of a position encoding.

    Args:
        positions: (encoding, int32 positions (B, T), a number above all positions) -> their arrays.
        apply: (encoding, queries (B, T, H, K), keys (B, T, J, K), arrays of the query positions, arrays of the key
            positions, scale of the products) -> queries and keys, with `added_dims` more dims.
    """

    positions: Callable[..., EncodedPositions]
    apply: Callable[..., tuple[jax.Array, jax.Array]]


ENCODINGS: dict[type[PositionEncoding], Encoding] = {
    Rotary: Encoding(rotation, rotate_both),
    Alibi: Encoding(digits, with_positions),
}
