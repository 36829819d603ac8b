"""What a device keeps of the slots of a cache between calls, and the steps that change it.

Shapes: N slots, B of them that a call works on, S positions of a slot, P positions of a piece of a prompt, I steps of a call,
V vocabulary rows, E end tokens, C alternatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.infer.requests import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, OPTIONS
from mesh_transformer.infer.sampling import Options, Seen, likeliest, penalise, sample
from mesh_transformer.ops.attend.cached import KVCache


class Slots(NamedTuple):
    """Everything that is kept between calls, on the device. A slot with nothing `left` computes nothing."""

    cache: KVCache
    length_N: jax.Array  # int32: valid positions of the cache
    token_N: jax.Array  # int32: the newest token, which is not in the cache yet
    left_N: jax.Array  # int32: tokens that may still be drawn
    drawn_N: jax.Array  # int32: tokens drawn so far
    min_tokens_N: jax.Array  # int32: before so many, no end token is drawn
    seed_N: jax.Array  # uint32
    options: Options  # (N,) each
    end_NE: jax.Array  # int32, -1 where there are fewer: the tokens that end a completion
    biased_N: jax.Array  # bool: there is a logit bias
    bias_NV: jax.Array  # float32
    tokens_NS: jax.Array  # int32: prompt and completion
    in_prompt_NV: jax.Array  # bool
    counts_NV: jax.Array  # int32: occurrences in the completion

    @property
    def live_N(self) -> jax.Array:  # bool: not those in mid-prompt, which have nothing to go on from
        return (self.left_N > 0) & (self.drawn_N > 0)


class Drawn(NamedTuple):
    """The next token of each of B slots; where not `live_B` nothing was drawn."""

    token_B: jax.Array  # int32
    logprob_B: jax.Array  # float32, nats, of the raw distribution
    top_id_BC: jax.Array  # int32: as many as were asked for mean something
    top_logprob_BC: jax.Array
    live_B: jax.Array  # bool
    ended_B: jax.Array  # bool: the token is an end token


class Scores(NamedTuple):
    """The log-probabilities of given tokens, and the likeliest ones there."""

    logprob_P: jax.Array
    top_id_PC: jax.Array
    top_logprob_PC: jax.Array


class Request(NamedTuple):
    """One request, as `insert` takes it: host arrays."""

    tokens_S: Any  # int32: the prompt, then anything
    n_tokens: Any  # int32
    reused: Any  # int32: positions that are in the slot's cache already
    max_tokens: Any  # int32
    min_tokens: Any  # int32
    seed: Any  # uint32
    options: Any  # a scalar for each row of `requests.OPTIONS`, by name
    end_E: Any  # int32
    biased: Any  # bool
    bias_V: Any  # float32


def empty(cache: KVCache, n_slots: int, context: int, vocab: int) -> Slots:
    """Slots that compute nothing."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((n_slots, *shape), dtype)

    return Slots(
        cache=cache,
        length_N=zeros(),
        token_N=zeros(),
        left_N=zeros(),
        drawn_N=zeros(),
        min_tokens_N=zeros(),
        seed_N=zeros(dtype=jnp.uint32),
        options={name: zeros(dtype=option.dtype) for name, option in OPTIONS.items()},
        end_NE=zeros(MAX_STOP_TOKENS),
        biased_N=zeros(dtype=bool),
        bias_NV=zeros(vocab, dtype=jnp.float32),
        tokens_NS=zeros(context),
        in_prompt_NV=zeros(vocab, dtype=bool),
        counts_NV=zeros(vocab),
    )


def insert(slots: Slots, slot: jax.Array, request: Request) -> Slots:
    """Give a slot to a request whose first `reused` positions are in its cache."""
    at = jnp.where(
        jnp.arange(len(request.tokens_S)) < request.n_tokens, request.tokens_S, len(request.bias_V)
    )
    in_prompt_V = jnp.zeros(request.bias_V.shape, bool).at[at].set(True, mode="drop")
    new = slots._replace(
        length_N=request.reused,
        token_N=jnp.int32(0),
        left_N=request.max_tokens,
        drawn_N=jnp.int32(0),
        min_tokens_N=request.min_tokens,
        seed_N=request.seed,
        options=request.options,
        end_NE=request.end_E,
        biased_N=request.biased,
        bias_NV=request.bias_V,
        tokens_NS=request.tokens_S,
        in_prompt_NV=in_prompt_V,
        counts_NV=jnp.zeros(request.bias_V.shape, jnp.int32),
    )
    rows = jax.tree.map(lambda all, one: all.at[slot].set(one), _row_wise(slots), _row_wise(new))
    return rows._replace(cache=slots.cache)


def _row_wise(slots: Slots) -> Slots:
    return slots._replace(cache=None)  # type: ignore[arg-type]


def copy_cache(slots: Slots, source: jax.Array, target: jax.Array) -> Slots:
    """Make a slot's keys and values those of another."""
    cache = jax.tree.map(lambda x: x.at[:, target].set(x[:, source]), slots.cache)
    return slots._replace(cache=cache)


def release(slots: Slots, slot: jax.Array) -> Slots:
    """Draw nothing more for a slot."""
    return slots._replace(left_N=slots.left_N.at[slot].set(0))


@jax.jit  # traced once for all programs with as many rows
def draw(
    slots: Slots, rows_B: jax.Array, logits_BV: jax.Array, live_B: jax.Array, n_top: jax.Array
) -> tuple[Slots, Drawn]:
    """The next token of some slots from its logits; slots that are not live stay as they are."""
    length_B, drawn_B, left_B = (x[rows_B] for x in (slots.length_N, slots.drawn_N, slots.left_N))

    def drawn_now() -> Drawn:
        # what a slot that is not live asks for would be computed for all
        options = {
            name: jnp.where(live_B, values_N[rows_B], OPTIONS[name].off)
            for name, values_N in slots.options.items()
        }
        end_BE = slots.end_NE[rows_B]
        seen = Seen(
            rows_B=rows_B,
            length_B=length_B,
            early_B=live_B & (drawn_B < slots.min_tokens_N[rows_B]),
            end_BE=end_BE,
            biased_B=live_B & slots.biased_N[rows_B],
            bias_NV=slots.bias_NV,
            tokens_NS=slots.tokens_NS,
            in_prompt_NV=slots.in_prompt_NV,
            counts_NV=slots.counts_NV,
        )
        keys_B = jax.vmap(_key)(slots.seed_N[rows_B], length_B)
        token_B = sample(penalise(logits_BV, options, seen), keys_B, options)
        logprobs_BV = jax.nn.log_softmax(logits_BV)
        logprob_B = jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]
        ended_B = (token_B[:, None] == end_BE).any(-1) & live_B
        return Drawn(token_B, logprob_B, *likeliest(logprobs_BV, n_top, MAX_TOP_LOGPROBS), live_B, ended_B)

    drawn = jax.lax.cond(live_B.any(), drawn_now, lambda: nothing_drawn(len(rows_B)))
    to = jnp.where(live_B, rows_B, len(slots.left_N))  # one beyond the last slot is dropped
    new = slots._replace(
        token_N=slots.token_N.at[to].set(drawn.token_B, mode="drop"),
        left_N=slots.left_N.at[to].set(jnp.where(drawn.ended_B, 0, left_B - 1), mode="drop"),
        drawn_N=slots.drawn_N.at[to].add(1, mode="drop"),
        tokens_NS=slots.tokens_NS.at[to, length_B].set(drawn.token_B, mode="drop"),
        counts_NV=slots.counts_NV.at[to, drawn.token_B].add(1, mode="drop"),
    )
    return new, drawn


def _key(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Of the draw at a position: it depends on nothing else that the batch does."""
    return jax.random.fold_in(jax.random.key(seed), position)


def nothing_drawn(n: int) -> Drawn:
    ids, values = jnp.zeros((n, MAX_TOP_LOGPROBS), jnp.int32), jnp.zeros((n, MAX_TOP_LOGPROBS), jnp.float32)
    no = jnp.zeros((n,), bool)
    return Drawn(ids[:, 0], values[:, 0], ids, values, no, no)
