"""Sampling against references in numpy, and against the filter of the original program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling_reference import kept_tokens, penalised

from mesh_transformer.infer.requests import LEAST_TEMPERATURE, MAX_TEMPERATURE, OPTIONS, SamplingParams
from mesh_transformer.infer.sampling import (
    OptionVectors,
    PenaltyInputs,
    keep_most_likely,
    most_likely,
    penalise,
    sample,
)


def _options(n: int, **options: float) -> OptionVectors:
    values = {**SamplingParams().options, **options}
    return {name: np.full(n, value, OPTIONS[name].dtype) for name, value in values.items()}


@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 1000])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 1.0])
def test_filter_equals_its_definition(top_k, top_p, min_p):
    logits = np.random.default_rng(top_k).normal(scale=3, size=(4, 50)).astype(np.float32)
    kept = keep_most_likely(
        logits, np.full(4, top_k, np.int32), np.full(4, top_p, np.float32), np.full(4, min_p, np.float32)
    )
    for row in range(4):
        assert set(np.flatnonzero(np.isfinite(kept[row]))) == kept_tokens(logits[row], top_k, top_p, min_p)
        finite = np.isfinite(kept[row])
        np.testing.assert_array_equal(np.asarray(kept[row])[finite], logits[row][finite])


@pytest.mark.parametrize("top_p", ["0.9", "0.5", "0.0"])
def test_top_p_keeps_what_the_original_keeps(original, top_p):
    golden = np.load(original / "fn_sampling.npz")
    logits, filtered = golden["logits"], golden[f"nucleaus_filter/top_p{top_p}_top_kNone"]
    ours = keep_most_likely(logits, np.zeros(2, np.int32), np.full(2, float(top_p), np.float32), np.zeros(2))
    np.testing.assert_array_equal(np.isfinite(ours), filtered > -1e9)


def test_draws_follow_the_filtered_distribution():
    logits = np.log(np.array([[0.5, 0.25, 0.15, 0.1]], np.float32))
    n = 4000
    keys = jax.random.split(jax.random.key(0), n)
    tokens = np.asarray(sample(np.repeat(logits, n, 0), keys, _options(n, temperature=0.5, top_k=3)))
    weights = np.array([0.5, 0.25, 0.15, 0]) ** 2  # temperature 0.5 squares, top-k 3 drops the last
    share = np.bincount(tokens, minlength=4) / n
    # four standard errors of a fraction of at most 0.75 in 4000 samples
    np.testing.assert_allclose(share, weights / weights.sum(), atol=4 * np.sqrt(0.25 / n))
    assert share[3] == 0


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("tokens", [[5], [5, 5], [5, 5, 5], [1, 2, 1], [1, 2, 3, 1, 2], [1, 2, 3]], ids=str)
def test_repeated_ngrams_are_excluded(tokens, n):
    """Also where the sequence is one n-gram of equal tokens, as in transformers."""
    expected = penalised(np.zeros(8, np.float32), tokens, 0, SamplingParams(no_repeat_ngram_size=n))
    # of a longer sequence before it
    padded = np.full((1, 12), 5, np.int32)
    padded[0, : len(tokens)] = tokens
    inputs = PenaltyInputs(
        rows_B=jnp.zeros(1, jnp.int32), length_B=jnp.full(1, len(tokens), jnp.int32), early_B=jnp.zeros(1, bool),
        end_BE=jnp.full((1, 1), -1, jnp.int32), biased_B=jnp.zeros(1, bool), bias_NV=jnp.zeros((1, 8)),
        tokens_NS=jnp.asarray(padded), in_prompt_NV=jnp.zeros((1, 8), bool), counts_NV=jnp.zeros((1, 8), jnp.int32),
        drawn_B=jnp.zeros(1, jnp.int32), worded_B=jnp.zeros(1, bool), bad_words_NWT=jnp.full((1, 1, 2), -1),
    )  # fmt: skip
    found = penalise(jnp.zeros((1, 8)), _options(1, no_repeat_ngram_size=n), inputs)
    np.testing.assert_array_equal(found, expected[None])


def test_temperature_zero_is_greedy_beside_others_that_are_not():
    logits = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    options = {**_options(2), "temperature": np.float32([0, 1])}
    draws = {tuple(np.asarray(sample(logits, jax.random.split(jax.random.key(s), 2), options))) for s in range(20)}
    assert {first for first, _ in draws} == {int(logits[0].argmax())}
    assert len({second for _, second in draws}) > 5


def test_minus_zero_ties_with_zero():
    """This holds in a compiled program too, where XLA removes `x + 0.0`."""
    logits = np.float32([[0.0, -0.0, -1.0, -0.0], [-0.0, 0.0, -1.0, -2.0]])
    ones = np.ones(2, np.float32)
    for top_k, top_p in ((1, 1.0), (0, 0.25)):
        kept = jax.jit(keep_most_likely)(logits, np.full(2, top_k, np.int32), ones * top_p, ones * 0)
        assert np.isfinite(kept).tolist() == [[True, True, False, True], [True, True, False, False]]


REAL, NAN, INF = 5, np.nan, np.inf


@pytest.mark.parametrize(
    "row",
    [[NAN] * REAL, [-INF] * REAL, [NAN, 1, 2, NAN, -INF], [INF, 1, INF, 0, NAN], [-3e38, 3e38, 0, 1, 2]],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0, LEAST_TEMPERATURE, 1, MAX_TEMPERATURE])
def test_no_draw_is_a_padding_row(row, temperature):
    n = 40
    padded = np.float32([[*row, -INF, -INF, -INF]] * n)
    for filters in ({"top_k": 2, "top_p": 0.5}, {}):
        options = _options(n, temperature=temperature, **filters)
        assert int(jax.jit(sample)(padded, jax.random.split(jax.random.key(0), n), options).max()) < REAL
    ids, _ = most_likely(jax.nn.log_softmax(padded), jnp.int32(1), 1)
    assert int(ids.max()) < REAL


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e39),
        ("temperature", NAN),
        ("repetition_penalty", 1e39),
        ("repetition_penalty", 1e-39),
        ("repetition_penalty", INF),
        ("top_p", NAN),
        ("min_p", NAN),
        ("presence_penalty", NAN),
        ("logit_bias", ((1, 1e39),)),
        ("logit_bias", ((1, NAN),)),
    ],
)
def test_what_float32_cannot_hold_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} must be "):
        SamplingParams(**{field: value})
