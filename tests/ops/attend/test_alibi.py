"""ALiBi as further dims of queries and keys: its slopes, and its bias at late positions."""

import jax.numpy as jnp
import numpy as np
import pytest

from mesh_transformer.ops.positions import alibi_slopes, digits, with_positions
from mesh_transformer.spec import Alibi


@pytest.mark.parametrize("heads", [1, 2, 6, 7, 12, 16, 20, 112])
def test_slopes_are_those_of_transformers(heads) -> None:
    import torch
    from transformers.models.bloom.modeling_bloom import _get_alibi_slopes

    expected = _get_alibi_slopes(heads, torch.device("cpu")).numpy()
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_has_the_slope_times_the_position(dtype) -> None:
    """Both digits of a position are numbers of bfloat16, so that near keys differ by their distance at any position."""
    positions, heads, scale = np.array([[0, 1, 255, 256, 511, 32_766, 32_767]]), 4, 0.125
    zero = jnp.zeros((1, positions.size, heads, 3), dtype)
    encoded = digits(Alibi(), jnp.asarray(positions), 32_768)
    q, k = with_positions(Alibi(), zero, zero, encoded, encoded, scale)
    assert q.dtype == k.dtype == dtype
    found = scale * np.einsum("bthk,bshk->bhts", np.asarray(q, np.float32), np.asarray(k, np.float32))
    slopes = np.array([0.25, 0.0625, 0.015625, 0.00390625])
    # scale and slopes are powers of two
    np.testing.assert_array_equal(found, np.broadcast_to(slopes[:, None, None] * positions, found.shape))
