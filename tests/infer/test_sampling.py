"""Sampling against definitions in plain numpy, and the original's filter."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mesh_transformer.infer.sampling import SamplingOptions, keep_most_likely, sample


def _kept(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """Top-k, then the smallest set of the renormalised rest whose probability reaches top_p."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    probability = np.exp(logits[order] - logits[order].max())
    probability /= probability.sum()
    before = np.cumsum(probability) - probability
    return {int(token) for i, token in enumerate(order) if i == 0 or before[i] < top_p}


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
def test_filter_equals_its_definition(top_k, top_p):
    logits = np.random.default_rng(top_k).normal(scale=3, size=(4, 50)).astype(np.float32)
    kept = keep_most_likely(logits, np.full(4, top_k, np.int32), np.full(4, top_p, np.float32))
    for row in range(4):
        assert set(np.flatnonzero(np.isfinite(kept[row]))) == _kept(logits[row], top_k, top_p)
        finite = np.isfinite(kept[row])
        np.testing.assert_array_equal(np.asarray(kept[row])[finite], logits[row][finite])


@pytest.mark.parametrize("top_p", ["0.9", "0.5", "0.0"])
def test_top_p_keeps_what_the_original_keeps(shared, top_p):
    golden = np.load(shared / "golden/fn_sampling.npz")
    logits, filtered = golden["logits"], golden[f"nucleaus_filter/top_p{top_p}_top_kNone"]
    ours = keep_most_likely(logits, np.zeros(2, np.int32), np.full(2, float(top_p), np.float32))
    np.testing.assert_array_equal(np.isfinite(ours), filtered > -1e9)


def test_draws_follow_the_filtered_distribution():
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32))
    n = 4000
    keys = jax.random.split(jax.random.key(0), n)
    tokens = np.asarray(sample(np.repeat(logits, n, 0), keys, SamplingOptions.same(n, 0.5, 1.0, 3)))
    weights = np.array([0.5, 0.25, 0.15, 0]) ** 2  # temperature 0.5 squares, top-k 3 drops the last
    share = np.bincount(tokens, minlength=4) / n
    # four standard errors of a share of at most 0.75 in 4000 draws
    np.testing.assert_allclose(share, weights / weights.sum(), atol=4 * np.sqrt(0.25 / n))
    assert share[3] == 0


def test_temperature_zero_is_greedy_beside_others_that_are_not():
    logits = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    options = SamplingOptions(np.float32([0, 1]), np.float32([1, 1]), np.int32([0, 0]))
    draws = {
        tuple(np.asarray(sample(logits, jax.random.split(jax.random.key(s), 2), options))) for s in range(20)
    }
    assert {first for first, _ in draws} == {int(logits[0].argmax())}
    assert len({second for _, second in draws}) > 5
