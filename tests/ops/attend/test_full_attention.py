"""Attention without a causal mask: against JAX's own attention, and with positions that devices split."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.config import mesh_shape
from mesh_transformer.errors import UserError
from mesh_transformer.ops import attention
from mesh_transformer.parallel import Partition, dimension_rules, make_mesh, use

B, T, H, K, SCALE = 2, 24, 4, 8, 0.3
# float32 sums in another order
CLOSE = 2e-6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"key_heads": 2},
    "bias": {"bias": True},
    "segments": {"segments": True},
    "all": {"segments": True, "bias": True},
}
MESHES = {"cp4": {"cp": 4}, "cp2_fsdp2_tp2": {"cp": 2, "fsdp": 2, "tp": 2}}


def partition_of(mesh: dict[str, int], **fields: Any) -> Partition:
    devices = jax.devices()[: int(np.prod(list(mesh.values())))]
    return Partition(make_mesh(mesh_shape(**mesh), devices), dimension_rules(), **fields)


def theirs(q, k, v, bias, segments):
    mask = None if segments is None else (segments[:, :, None] == segments[:, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, bias, mask, scale=SCALE)


def ours(q, k, v, bias, segments):
    return attention(bias, segments, causal=False)(q, k, v, scale=SCALE)


def output_and_gradients(attend: Any, case: str) -> list[np.ndarray]:
    """The output, and the gradients of q, k, v and the bias, for numbers that depend on the case only."""
    keys = jax.random.split(jax.random.key(0), 5)
    key_heads = CASES[case].get("key_heads", H)
    heads = (H, key_heads, key_heads, H)
    *qkv, dy = (jax.random.normal(key, (B, T, h, K)) for key, h in zip(keys, heads, strict=False))
    bias = jax.random.normal(keys[4], (1, H, T, T)) if "bias" in CASES[case] else None
    segments = np.repeat([[0, 1, 2], [4, 3, 4]], [3, 10, 11], axis=1) if "segments" in CASES[case] else None

    @jax.jit
    def run(*arrays):
        y, pull = jax.vjp(lambda *given: attend(*given, None if segments is None else jnp.asarray(segments)), *arrays)
        return [y, *pull(dy)]

    return [np.asarray(x) for x in run(*qkv, bias) if x is not None]


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_attention_of_jax(case: str) -> None:
    for found, expected in zip(output_and_gradients(ours, case), output_and_gradients(theirs, case), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE * np.abs(expected).max())


@pytest.mark.parametrize("mode", ["zigzag", "ulysses"])
@pytest.mark.parametrize("mesh", MESHES)
def test_devices_that_split_positions_compute_the_same(mesh: str, mode: str) -> None:
    """No query depends on the order of the keys, so the order of the mode needs no mask."""
    expected = output_and_gradients(theirs, "all")
    with use(partition_of(MESHES[mesh], context_mode=mode)):
        found = output_and_gradients(ours, "all")
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=CLOSE * np.abs(y).max())


def test_a_soft_cap_bounds_the_logits() -> None:
    q = k = 100 * jnp.ones((1, 2, 1, 4)) * jnp.array([1.0, -1.0])[None, :, None, None]
    v = jnp.array([0.0, 1.0])[None, :, None, None]
    found = attention(causal=False)(q, k, v, scale=1.0, softcap=2.0)
    # logits of the first query are 2 and -2
    np.testing.assert_allclose(found[0, :, 0, 0], [1 / (1 + np.exp(4)), 1 / (1 + np.exp(-4))], rtol=1e-5)


def test_what_it_cannot_compute() -> None:
    q = jnp.zeros((B, T, H, K))
    with pytest.raises(UserError, match="has no window"):
        attention(causal=False)(q, q, q, scale=SCALE, window=3)
    with use(partition_of({}, attention="splash")), pytest.raises(UserError, match="kernel splash computes causal"):
        attention(causal=False)(q, q, q, scale=SCALE)
