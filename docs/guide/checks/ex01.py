"""Checks of the exercises of chapter 1, against the library's operations and against counts of arrays."""

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer import ops
from mesh_transformer.ops.positions import rotate, rotation
from mesh_transformer.spec import Rotary

TOLERANCE = 1e-4


def _difference(ours, theirs):
    assert np.shape(ours) == np.shape(theirs), f"the result has the shape {np.shape(ours)}, not {np.shape(theirs)}"
    return float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())


def check_rotate_halves(answer):
    """Against the library's rotation, at positions that begin at 5."""
    x = jax.random.normal(jax.random.key(0), (2, 8, 3, 16))
    positions = np.arange(5, 13)

    def library(base, style="halves", positions=positions):
        encoding = Rotary(dims=16, style=style, base=base)
        return rotate(x, rotation(encoding, jnp.asarray(positions)[None], 32), style)

    for base in (10_000.0, 500.0):
        ours = answer(x, positions, base)
        far = _difference(ours, library(base))
        guess = "Compare single pairs: number 0 and number 8 of a head turn together."
        if _difference(ours, library(base, "pairs")) <= TOLERANCE:
            guess = "It turns neighbours: numbers 0 and 1 instead of 0 and 8."
        elif _difference(ours, library(base, positions=np.arange(8))) <= TOLERANCE:
            guess = "It counts positions from 0 instead of reading positions_T."
        elif _difference(ours, library(base, positions=-positions)) <= TOLERANCE:
            guess = "It turns the other way: look at the signs of the sines."
        elif _difference(ours, library(10_000.0)) <= TOLERANCE:
            guess = "It does not use base."
        assert far <= TOLERANCE, f"the largest difference is {far:.2g} for base {base:g}. {guess}"


def check_grouped_attention(answer):
    """Against the library's attention, with 6 heads of queries and 2 of keys."""
    q, k, v = (jax.random.normal(jax.random.key(n), (2, 8, heads, 4)) for n, heads in enumerate((6, 2, 2)))

    def library(q, k, v, **fields):
        return ops.attention()(q, k, v, **{"scale": 0.5, **fields})

    def every_second(x):
        return x.reshape(2, 8, 3, 2, 4).swapaxes(2, 3).reshape(x.shape)

    ours = answer(q, k, v)
    far = _difference(ours, library(q, k, v))
    guess = "Compare the first position: it sees only itself, so it returns the values of its head."
    swapped = library(every_second(q), k, v).reshape(2, 8, 2, 3, 4).swapaxes(2, 3).reshape(q.shape)
    if _difference(ours, swapped) <= TOLERANCE:
        guess = "Neighbouring heads of queries must share keys: here every second head does. Reshape H to (J, H / J)."
    elif _difference(ours, library(q, k, v, scale=1.0)) <= TOLERANCE:
        guess = "The scores are not divided by the root of K."
    elif _difference(ours[:, -1], library(q, k, v)[:, -1]) <= TOLERANCE:
        guess = "Only the last position is right: the mask is missing."
    assert far <= TOLERANCE, f"the largest difference is {far:.2g}. {guess}"


def check_bits_per_byte(answer):
    """Against float64, with tokens of 1 to 9 bytes."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((2, 16, 9)).astype(np.float32)
    targets, sizes = random.integers(0, 9, (2, 16)), np.arange(1, 10)
    exact = logits.astype(np.float64)
    nats = np.log(np.exp(exact).sum(-1)) - np.take_along_axis(exact, targets[..., None], -1)[..., 0]
    right = nats.sum() / np.log(2) / sizes[targets].sum()
    ours = float(answer(jnp.asarray(logits), jnp.asarray(targets), jnp.asarray(sizes)))
    guess = "It is the total of the bits, divided by the total of the bytes."
    for wrong, name in (
        (nats.sum() / sizes[targets].sum(), "It is in nats: divide by ln 2."),
        (nats.mean() / np.log(2), "It is bits for each token: divide by bytes, not by tokens."),
        ((nats / sizes[targets]).mean() / np.log(2), "It is a mean of ratios: divide the sums instead."),
        (nats.mean() / np.log(2) / sizes.mean(), "The bytes are those of the vocabulary, not those of the text."),
    ):
        if abs(ours - wrong) < TOLERANCE:
            guess = name
    assert abs(ours - right) < TOLERANCE, f"the answer is {ours:.4f}, but it should be {right:.4f}. {guess}"


def check_layer_intensity(answer):
    """Against XLA's count of the FLOPs, and the sizes of the arrays."""
    for D, F, tokens in ((64, 256, 1024), (64, 256, 1), (32, 48, 7)):
        x, hidden = (jax.ShapeDtypeStruct((tokens, size), jnp.float32) for size in (D, F))
        products = [(x, D, 3 * D), (x, D, D), (x, D, F), (hidden, F, D)]
        flops = bytes_moved = 0
        for inputs, rows, columns in products:
            w = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
            flops += jax.jit(jnp.matmul).lower(inputs, w).cost_analysis()["flops"]
            bytes_moved += sum(4 * a.size for a in (inputs, w, jax.eval_shape(jnp.matmul, inputs, w)))
        ours = answer(D, F, tokens)
        case = f"for D {D}, F {F} and {tokens} tokens"
        guess = " A multiplication and an addition are two." if 2 * ours[0] == flops else ""
        assert ours[0] == flops, f"{case} you count {ours[0]:,} FLOPs, XLA counts {flops:,.0f}.{guess}"
        guess = "Count inputs and outputs of all four products, and each matrix once."
        if 4 * ours[1] == bytes_moved:
            guess = "A float32 has 4 bytes."
        elif ours[1] - bytes_moved == 2 * 4 * D * tokens:
            guess = "q, k and v read their input once, not three times."
        assert ours[1] == bytes_moved, (
            f"{case} you count {ours[1]:,} bytes, and the arrays have {bytes_moved:,}. {guess}"
        )
