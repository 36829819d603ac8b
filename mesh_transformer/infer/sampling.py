"""Choosing the next token: the steps of `requests.SamplingParams`, on the device.

A step that no sequence needs is skipped. Shapes: B sequences, each in one of N slots, S positions of a slot, V
vocabulary rows, E stop tokens, C alternatives.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.infer.requests import LEAST_TEMPERATURE

OptionVectors = dict[str, jax.Array]
"""A vector (B,) for each row of `requests.OPTIONS`, by name."""


class PenaltyInputs(NamedTuple):
    """The inputs of the steps before the temperature. Large arrays hold all N slots: a step gathers its rows if it
    runs.

    Args:
        rows_B: int32, the slots of the sequences.
        length_B: int32, tokens of prompt and completion.
        early_B: bool, whether stop tokens are excluded because there are fewer than min_tokens tokens.
        end_BE: int32, the stop tokens, padded with -1.
        biased_B: bool, whether there is a logit bias.
        bias_NV: float32, the logit bias.
        tokens_NS: int32, the tokens of prompt and completion.
        in_prompt_NV: bool, whether a token is in the prompt.
        counts_NV: int32, occurrences of each token in the completion.
        drawn_B: int32, tokens of the completion.
        worded_B: bool, whether there are bad words.
        bad_words_NWT: int32, the tokens of each bad word, padded with -1 on the left.
    """

    rows_B: jax.Array
    length_B: jax.Array
    early_B: jax.Array
    end_BE: jax.Array
    biased_B: jax.Array
    bias_NV: jax.Array
    tokens_NS: jax.Array
    in_prompt_NV: jax.Array
    counts_NV: jax.Array
    drawn_B: jax.Array
    worded_B: jax.Array
    bad_words_NWT: jax.Array


def penalise(logits_BV: jax.Array, options: OptionVectors, inputs: PenaltyInputs) -> jax.Array:
    """Logits after bias, penalties and exclusions: the steps before the temperature."""
    o = options
    penalties_B = (o["repetition_penalty"] != 1) | (o["presence_penalty"] != 0) | (o["frequency_penalty"] != 0)
    n_B = o["no_repeat_ngram_size"]
    logits_BV = _apply_if(inputs.biased_B.any(), lambda x: _add_bias(x, inputs), logits_BV)
    logits_BV = _apply_if(penalties_B.any(), lambda x: _apply_penalties(x, o, inputs), logits_BV)
    logits_BV = _apply_if((n_B > 0).any(), lambda x: _exclude_repeated_ngrams(x, n_B, inputs), logits_BV)
    logits_BV = _apply_if(inputs.worded_B.any(), lambda x: _exclude_bad_words(x, inputs), logits_BV)
    return _apply_if(inputs.early_B.any(), lambda x: _exclude_stop_tokens(x, inputs), logits_BV)


def sample(logits_BV: jax.Array, keys_B: jax.Array, options: OptionVectors) -> jax.Array:
    """Sample one token per sequence, (B,) int32: temperature, min-p, top-k, top-p (Holtzman et al. 2020), then a draw.

    A temperature below LEAST_TEMPERATURE chooses the largest logit. Tokens with logit -inf or NaN are not chosen, so
    padding rows of the vocabulary are not chosen either. If all logits are -inf or NaN, the token is 0.
    """
    o, logits_BV = options, _nan_to_neg_inf(logits_BV)
    drawn_B, greedy_B = o["temperature"] >= LEAST_TEMPERATURE, _argmax(logits_BV)

    def draw(logits_BV: jax.Array) -> jax.Array:
        temperature_B = jnp.where(drawn_B, o["temperature"], 1.0)
        kept = keep_most_likely(logits_BV / temperature_B[:, None], o["top_k"], o["top_p"], o["min_p"])
        return jnp.where(drawn_B, jax.vmap(jax.random.categorical)(keys_B, kept).astype(jnp.int32), greedy_B)

    return jax.lax.cond(drawn_B.any(), draw, lambda _: greedy_B, logits_BV)


def keep_most_likely(logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array) -> jax.Array:
    """Set logits to -inf by min-p, then top-k, then top-p.

    Kept are the tokens with at least min_p times the largest probability, of these the k most likely, and of these the
    smallest set with probability top_p. The most likely token is always kept, and so are tokens equal to the last kept
    one.
    """
    n_vocab = logits_BV.shape[-1]
    k_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, n_vocab), n_vocab)
    logits_BV = _apply_if((min_p_B > 0).any(), lambda x: _keep_min_p(x, min_p_B), logits_BV)
    logits_BV = _apply_if((k_B < n_vocab).any(), lambda x: _keep_top_k(x, k_B), logits_BV)
    return _apply_if((top_p_B < 1).any(), lambda x: _keep_top_p(x, top_p_B), logits_BV)


def most_likely(logprobs_BV: jax.Array, n_top: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """The most likely tokens and their log-probabilities, (B, most) each, the most likely first.

    Of equal tokens, the one with the lower ID is first.

    Args:
        n_top: int32 scalar, at most `most`. Only the first `n_top` columns are valid.
    """
    n = logprobs_BV.shape[0]

    def take_likeliest(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left_BV, ids_BC, values_BC = carry
        id_B = _argmax(left_BV)
        value_B = jnp.take_along_axis(left_BV, id_B[:, None], axis=-1)[:, 0]
        left_BV = left_BV.at[jnp.arange(n), id_B].set(-jnp.inf)
        return left_BV, ids_BC.at[:, i].set(id_B), values_BC.at[:, i].set(value_B)

    empty = logprobs_BV, jnp.zeros((n, most), jnp.int32), jnp.zeros((n, most), jnp.float32)
    return jax.lax.fori_loop(0, n_top, take_likeliest, empty)[1:]


def _argmax(x_BV: jax.Array) -> jax.Array:
    """The first index of the largest number of each row, int32. XLA for CPU vectorizes these two reductions."""
    x_BV, n = _nan_to_neg_inf(x_BV), x_BV.shape[-1]
    return jnp.where(x_BV == x_BV.max(-1, keepdims=True), jnp.arange(n, dtype=jnp.int32)[None], n).min(-1)


def _nan_to_neg_inf(x: jax.Array) -> jax.Array:
    """Replace NaN by -inf."""
    return jnp.where(jnp.isnan(x), -jnp.inf, x)


def _apply_if(flag: jax.Array, change: Callable[[jax.Array], jax.Array], logits_BV: jax.Array) -> jax.Array:
    return jax.lax.cond(flag, change, lambda x: x, logits_BV)


def _add_bias(logits_BV: jax.Array, inputs: PenaltyInputs) -> jax.Array:
    return jnp.where(inputs.biased_B[:, None], logits_BV + inputs.bias_NV[inputs.rows_B], logits_BV)


def _apply_penalties(logits_BV: jax.Array, o: OptionVectors, inputs: PenaltyInputs) -> jax.Array:
    """Apply the repetition penalty (prompt and completion), then the frequency and presence penalties (completion)."""
    counts_BV = inputs.counts_NV[inputs.rows_B]
    repeated = inputs.in_prompt_NV[inputs.rows_B] | (counts_BV > 0)
    penalty_B1 = o["repetition_penalty"][:, None]
    penalised = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = jnp.where(repeated, penalised, logits_BV)
    logits_BV = logits_BV - o["frequency_penalty"][:, None] * counts_BV.astype(jnp.float32)
    return logits_BV - o["presence_penalty"][:, None] * (counts_BV > 0).astype(jnp.float32)


def _exclude_repeated_ngrams(logits_BV: jax.Array, n_B: jax.Array, inputs: PenaltyInputs) -> jax.Array:
    """Exclude the tokens that would repeat an n-gram."""
    tokens_BS, length_B = inputs.tokens_NS[inputs.rows_B], inputs.length_B
    positions = jnp.arange(tokens_BS.shape[1])[None]

    def same(back: jax.Array, matches_BS: jax.Array) -> jax.Array:
        """Position p matches if the token `back` before p equals the token `back` before the next one."""
        last_B = jnp.take_along_axis(tokens_BS, jnp.maximum(length_B - back, 0)[:, None], axis=1)
        equal = (jnp.roll(tokens_BS, back, axis=1) == last_B) & (positions >= back)
        return matches_BS & (equal | (back >= n_B[:, None]))

    inside = (positions < length_B[:, None]) & (n_B[:, None] > 0) & (length_B >= n_B)[:, None]
    matches_BS = jax.lax.fori_loop(1, n_B.max(), same, inside)
    banned = jnp.where(matches_BS, tokens_BS, logits_BV.shape[-1])
    return logits_BV.at[jnp.arange(len(banned))[:, None], banned].set(-jnp.inf, mode="drop")


def _exclude_bad_words(logits_BV: jax.Array, inputs: PenaltyInputs) -> jax.Array:
    """Exclude the last token of each bad word whose other tokens end the completion."""
    words_BWT = jnp.where(inputs.worded_B[:, None, None], inputs.bad_words_NWT[inputs.rows_B], -1)
    n_vocab, n_before = logits_BV.shape[-1], words_BWT.shape[-1] - 1
    back = jnp.arange(n_before, 0, -1)[None]
    places_BT = inputs.length_B[:, None] - back
    ends_BT = jnp.take_along_axis(inputs.tokens_NS[inputs.rows_B], jnp.maximum(places_BT, 0), axis=1)
    # no token is -2, so that a place before the completion matches no word
    ends_BT = jnp.where(back <= inputs.drawn_B[:, None], ends_BT, -2)
    before_BWT, last_BW = words_BWT[..., :-1], words_BWT[..., -1]
    complete_BW = ((before_BWT == ends_BT[:, None]) | (before_BWT < 0)).all(-1) & (last_BW >= 0)
    banned_BW = jnp.where(complete_BW, last_BW, n_vocab)
    return logits_BV.at[jnp.arange(len(banned_BW))[:, None], banned_BW].set(-jnp.inf, mode="drop")


def _exclude_stop_tokens(logits_BV: jax.Array, inputs: PenaltyInputs) -> jax.Array:
    ends = jnp.where(inputs.early_B[:, None] & (inputs.end_BE >= 0), inputs.end_BE, logits_BV.shape[-1])
    return logits_BV.at[jnp.arange(len(ends))[:, None], ends].set(-jnp.inf, mode="drop")


def _keep_min_p(logits_BV: jax.Array, min_p_B: jax.Array) -> jax.Array:
    smallest = logits_BV.max(-1) + jnp.log(min_p_B)
    return jnp.where(logits_BV >= smallest[:, None], logits_BV, -jnp.inf)


def _keep_top_k(logits_BV: jax.Array, k_B: jax.Array) -> jax.Array:
    keys_BV = _ordered_keys(logits_BV)
    smallest_B = _bisect(lambda key_B: (keys_BV >= key_B[:, None]).sum(-1) >= k_B, keys_BV)
    return jnp.where(keys_BV >= smallest_B[:, None], logits_BV, -jnp.inf)


def _keep_top_p(logits_BV: jax.Array, top_p_B: jax.Array) -> jax.Array:
    """Keep a token if the more likely tokens have a total probability below top_p."""
    keys_BV, mass_BV = _ordered_keys(logits_BV), jax.nn.softmax(logits_BV, axis=-1)

    def too_low(key_B: jax.Array) -> jax.Array:
        return jnp.where(keys_BV >= key_B[:, None], mass_BV, 0).sum(-1) >= top_p_B

    smallest_B = _bisect(too_low, keys_BV)
    kept = (keys_BV >= smallest_B[:, None]) | (top_p_B >= 1)[:, None]
    return jnp.where(kept, logits_BV, -jnp.inf)


def _ordered_keys(x: jax.Array) -> jax.Array:
    """Map float32 numbers to int32 numbers in the same order."""
    # map -0.0 to 0.0 first; XLA would remove `x + 0.0`
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _bisect(holds: Callable[[jax.Array], jax.Array], keys_BV: jax.Array) -> jax.Array:
    """The largest number for which `holds` is true, between the smallest and the largest key of each row.

    `holds` must be true below some number and false above it. A bisection finds it in at most 32 passes over the rows,
    without sorting. If `holds` is false everywhere, the result is the smallest key.
    """

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        # the mean, rounded up, without overflow
        middle_B = (low_B | high_B) - ((low_B ^ high_B) >> 1)
        holds_B = holds(middle_B)
        return jnp.where(holds_B, middle_B, low_B), jnp.where(holds_B, high_B, middle_B - 1)

    bounds = keys_BV.min(-1), keys_BV.max(-1)
    return jax.lax.while_loop(lambda bounds: (bounds[0] < bounds[1]).any(), halve, bounds)[0]
