"""Checks of the exercises of chapter 6: each compares an answer with the result of one device."""

from collections import Counter
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mesh_transformer.estimate.hlo import collectives

HEADS, POSITIONS, DIMS = 2, 64, 8
NEVER = -1e30


def normal(seed: int, *shape: int) -> np.ndarray:
    """Independent numbers of mean 0."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def block(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
    """Causal m, z and o of queries at positions `rows` and keys at positions `columns`."""
    scores = jnp.einsum("hck,hsk->hcs", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(rows[:, None] >= columns, scores, NEVER)
    m = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - m)
    return m, weights.sum(-1, keepdims=True), weights @ v


def check_merge_outputs(answer: Callable[..., tuple[jax.Array, jax.Array]]) -> None:
    """Two parts of the keys against all keys, with small and with large scores."""
    v = normal(1, HEADS, 12, DIMS)
    for height in (0, 1000):
        scores = normal(0, HEADS, 5, 12) + height

        def part(keys: slice, scores: np.ndarray = scores) -> tuple[jax.Array, jax.Array]:
            log_z = jax.nn.logsumexp(scores[..., keys], axis=-1, keepdims=True)
            return jnp.exp(scores[..., keys] - log_z) @ v[:, keys], log_z

        right_y, right_log_z = part(slice(None))
        y, log_z = answer(*part(slice(3)), *part(slice(3, None)))
        assert np.isfinite(y).all(), (
            f"with scores around {height} an exponential overflows: subtract the larger log_z first"
        )
        far = float(abs(y - right_y).max())
        assert far < 1e-3, (
            f"with scores around {height} the output differs by {far:.2g}. A block's share of the sum of all "
            "exponentials is exp(log_z1) / (exp(log_z1) + exp(log_z2)); it is the weight of y1"
        )
        assert abs(log_z - right_log_z).max() < 1e-3, "the output is right, but log_z is not of both blocks"


def check_last_hop(answer: Callable[..., jax.Array]) -> None:
    """A ring that ends with the answer."""
    q, k, v = (normal(seed, HEADS, POSITIONS, DIMS) for seed in range(3))
    places = jnp.arange(POSITIONS)
    _, z, o = block(q, k, v, places, places)
    right = np.asarray(o / z)
    for n in (2, 4):

        def ring(q: jax.Array, k: jax.Array, v: jax.Array, n: int = n) -> jax.Array:
            me, size = jax.lax.axis_index("cp"), q.shape[1]
            mine = me * size + jnp.arange(size)
            m, z, o = block(q, k, v, mine, mine)
            for step in range(1, n - 1):
                k, v = jax.lax.ppermute((k, v), "cp", [(i, (i + 1) % n) for i in range(n)])
                other_m, other_z, other_o = block(q, k, v, mine, (me - step) % n * size + jnp.arange(size))
                largest = jnp.maximum(m, other_m)
                w, other_w = jnp.exp(m - largest), jnp.exp(other_m - largest)
                m, z, o = largest, w * z + other_w * other_z, w * o + other_w * other_o
            return answer((m, z, o), q, k, v, "cp", n)

        mesh = Mesh(np.array(jax.devices()[:n]), ("cp",))
        run = jax.shard_map(ring, mesh=mesh, in_specs=P(None, "cp"), out_specs=P(None, "cp"))
        program = jax.jit(run).lower(q, k, v).compile()
        y = np.asarray(program(q, k, v))
        assert y.shape == right.shape, f"the devices return {y.shape} together: expected {right.shape}"
        far = np.abs(y - right).max(axis=(0, 2)).reshape(n, -1).max(axis=1)
        assert far.max() < 1e-5, (
            f"on {n} devices the output differs from one device, on device 0, 1, ... by "
            f"{', '.join(f'{value:.2g}' for value in far)}. Only the last device may see the keys of the last hop: "
            "whose keys are they, and at which positions? Is the sum divided by z at the end?"
        )
        found = Counter(one.kind for one in collectives(program.as_text()))
        assert set(found) == {"collective-permute"}, f"the program has {dict(found)}: use ppermute only"


def check_zigzag_order(answer: Callable[[int, int], np.ndarray]) -> None:
    """Each device's chunks, and its work."""
    for length, n in ((16, 2), (96, 4), (96, 8)):
        order = np.asarray(answer(length, n))
        assert sorted(order.tolist()) == list(range(length)), f"{length} positions: each must appear once"
        size = length // (2 * n)
        for device, held in enumerate(order.reshape(n, -1)):
            chunks = sorted(set((held // size).tolist()))
            expected = sorted({device, 2 * n - 1 - device})
            assert chunks == expected, f"device {device} of {n} has the chunks {chunks}: expected {expected}"
            assert (np.diff(held) > 0).all(), f"the positions of device {device} are not ascending"
        work = (order.reshape(n, -1) + 1).sum(axis=1)
        assert np.ptp(work) == 0, f"the devices compute {work.tolist()} scores: not the same work"
