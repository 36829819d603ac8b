"""Checks of the exercises of chapter 5: each compares an answer with the result of one device."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.estimate.hlo import collectives

TOKENS, WIDTH, HIDDEN = 128, 64, 256
COLUMNS, ROWS = P(None, "tp"), P("tp")


def devices(n: int) -> Mesh:
    """The first n devices as the axis tp."""
    return Mesh(np.array(jax.devices()[:n]), ("tp",))


def normal(seed: int, *shape: int) -> np.ndarray:
    """Independent numbers of mean 0."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def far(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, in units of the largest value."""
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


def check_relative_error(answer: Callable[[int], float]) -> None:
    """Run the program without its sum."""
    x, w_in, w_out = normal(0, TOKENS, WIDTH), normal(1, WIDTH, HIDDEN) / WIDTH**0.5, normal(2, HIDDEN, WIDTH)

    def without_sum(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
        # the first dimension tells what each device takes for the result
        return (jax.nn.gelu(x @ w_in) @ w_out)[None]

    right = np.asarray(jax.nn.gelu(x @ w_in) @ w_out)
    for n in (2, 4, 8):
        run = jax.shard_map(
            without_sum, mesh=devices(n), in_specs=(P(), COLUMNS, ROWS), out_specs=ROWS, check_vma=False
        )
        wrong = np.asarray(jax.jit(run)(x, w_in, w_out))
        measured = float(np.sqrt(((wrong - right) ** 2).mean() / (right**2).mean()))
        given = float(answer(n))
        assert abs(given / measured - 1) < 0.05, (
            f"on {n} devices the error is {measured:.3f} of the result, and your answer is {given:.3f}. The variances "
            "of summands that are not correlated add up; the size is the root of the variance. The error has how many "
            "summands?"
        )


def check_order_columns(answer: Callable[[jax.Array, int, int], jax.Array]) -> None:
    """Attention of the devices' heads against attention of all heads."""
    heads, head_width = 8, 8
    x, w_qkv = normal(0, TOKENS, WIDTH), normal(1, WIDTH, 3 * heads * head_width) / WIDTH**0.5

    def attention(x: jax.Array, w_qkv: jax.Array) -> jax.Array:
        q, k, v = (a.reshape(len(x), -1, head_width) for a in jnp.split(x @ w_qkv, 3, axis=1))
        weights = jax.nn.softmax(jnp.einsum("qhk,shk->hqs", q, k) / head_width**0.5)
        return jnp.einsum("hqs,shk->qhk", weights, v).reshape(len(x), -1)

    right = np.asarray(attention(x, w_qkv))
    for n in (2, 4):
        ordered = answer(jnp.asarray(w_qkv), heads, n)
        assert ordered.shape == w_qkv.shape, f"the matrix has the shape {ordered.shape}, and needs {w_qkv.shape}"
        run = jax.shard_map(attention, mesh=devices(n), in_specs=(P(), COLUMNS), out_specs=COLUMNS)
        difference = far(jax.jit(run)(x, ordered), right)
        assert difference < 1e-5, (
            f"on {n} devices attention differs from one device by {difference:.2g} of its largest value. Block i of "
            "the columns must be [queries of group i, keys of group i, values of group i]; in a group the heads and "
            "their dimensions keep their order"
        )


def check_scatter_ring(answer: Callable[[jax.Array, jax.Array, str, int], jax.Array]) -> None:
    """The ring against one product, and its collectives."""
    x, w = normal(0, TOKENS, HIDDEN), normal(1, HIDDEN, WIDTH) / HIDDEN**0.5
    for n in (2, 4, 8):

        def ring(x: jax.Array, w: jax.Array, n: int = n) -> jax.Array:
            y = answer(x, w, "tp", n)
            assert y.shape == (TOKENS // n, WIDTH), f"a device returns {y.shape}: expected {(TOKENS // n, WIDTH)}"
            return y

        run = jax.shard_map(ring, mesh=devices(n), in_specs=(COLUMNS, ROWS), out_specs=ROWS)
        program = jax.jit(run).lower(x, w).compile()
        difference = far(program(x, w), x @ w)
        assert difference < 1e-5, (
            f"on {n} devices the product differs from one device by {difference:.2g} of its largest value. If it is "
            "about 1, each sum ended at another device than its owner, or summands of different positions were added"
        )
        found = Counter(one.kind for one in collectives(program.as_text()))
        assert set(found) == {"collective-permute"}, f"the program has {dict(found)}: use ppermute only"
        assert found["collective-permute"] < n, f"{found['collective-permute']} permutes on {n} devices: {n - 1} do"
