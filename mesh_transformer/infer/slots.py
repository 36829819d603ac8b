"""The programs of the engine: what a device does with the slots of a cache.

Shapes: N slots, B of them that a call works on, S positions of a slot, P positions of a piece of a prompt, I steps of a call,
V vocabulary rows, E end tokens, C alternatives, D residual width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.infer.requests import MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from mesh_transformer.infer.sampling import SamplingOptions, Seen, likeliest, penalise, sample
from mesh_transformer.models.base import Model, Params
from mesh_transformer.ops.attention import KVCache
from mesh_transformer.parallel.sharding import Partition, constrain, use

MAX_STEPS = 16  # of a call of `generate`
_SCORED = 64  # positions of a prompt whose logits exist at a time


class Slots(NamedTuple):
    """Everything that is kept between calls, on the device. A slot with nothing `left` computes nothing."""

    cache: KVCache
    length_N: jax.Array  # int32: valid positions of the cache
    token_N: jax.Array  # int32: the newest token, which is not in the cache yet
    left_N: jax.Array  # int32: tokens that may still be drawn
    drawn_N: jax.Array  # int32: tokens drawn so far
    seed_N: jax.Array  # uint32
    options: SamplingOptions  # (N, ...)
    tokens_NS: jax.Array  # int32: prompt and completion
    in_prompt_NV: jax.Array  # bool
    counts_NV: jax.Array  # int32: occurrences in the completion
    bias_NV: jax.Array  # float32

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
    seed: Any  # uint32
    options: SamplingOptions  # scalars, and end_E
    bias_V: Any  # float32


class SlotPrograms:
    """The jitted functions of one model on one mesh. `slots` is donated everywhere."""

    def __init__(self, model: Model, partition: Partition, n_slots: int, context: int):
        self.model, self.partition, self.n_slots, self.context = model, partition, n_slots, context
        heads = self.partition.sharding(None, None, "heads", None, None)
        whole: Any = self.partition.sharding()
        abstract = jax.eval_shape(self._empty)
        cache: Any = KVCache(heads, heads)  # type: ignore[arg-type]
        shardings = jax.tree.map(lambda _: whole, abstract)._replace(cache=cache)
        self.empty = jax.jit(self._empty, out_shardings=shardings)
        self.insert = jax.jit(_insert, donate_argnums=0, out_shardings=shardings)
        self.copy_cache = jax.jit(_copy_cache, donate_argnums=0, out_shardings=shardings)
        self.release = jax.jit(_release, donate_argnums=0, out_shardings=shardings)
        self.prefill = jax.jit(
            self._prefill,
            donate_argnums=1,
            static_argnames="length",
            out_shardings=(shardings, whole, whole),
        )
        self.generate = jax.jit(
            self._generate, donate_argnums=1, static_argnames="length", out_shardings=(shardings, whole)
        )

    def _empty(self) -> Slots:
        n, v = self.n_slots, self.model.config.padded_vocab
        zeros = jnp.zeros((n,), jnp.int32)
        nothing = jnp.zeros((n,), jnp.float32)
        end_NE = jnp.full((n, MAX_STOP_TOKENS), -1, jnp.int32)
        options = SamplingOptions(
            *(nothing, nothing + 1, zeros, nothing, nothing + 1, nothing, nothing, zeros),
            *(zeros > 0, zeros, end_NE),
        )
        return Slots(
            self.model.new_cache(n, self.context),
            *(zeros, zeros, zeros, zeros, zeros.astype(jnp.uint32), options),
            jnp.zeros((n, self.context), jnp.int32),
            jnp.zeros((n, v), bool),
            jnp.zeros((n, v), jnp.int32),
            jnp.zeros((n, v), jnp.float32),
        )

    def _prefill(
        self,
        params: Params,
        slots: Slots,
        slot: jax.Array,
        tokens_P: jax.Array,
        targets_P: jax.Array,
        start: jax.Array,
        count: jax.Array,
        last: jax.Array,
        n_top: jax.Array,
        scored: jax.Array,
        *,
        length: int,
    ) -> tuple[Slots, Drawn, Scores]:
        """Compute `count` positions of a slot's prompt from `start` on, and draw the first token if they are the `last`.

        Args:
            slot: int32 scalar.
            tokens_P: int32, padded on the right.
            targets_P: int32: the token after each, whose log-probability is wanted.
            n_top: int32 scalar: alternatives that are wanted with each token.
            scored: bool: whether the Scores mean anything.
            length: positions of the cache that attention reads; at least start + P, or P with `start` 0.
        """
        with use(self.partition):
            view = slots.cache.view(slot[None], length)
            x_BTD, written = self.model.hidden(params, tokens_P[None], view, start[None])
            head = self.model.gathered_head(params)
            slots = slots._replace(
                cache=_written(written), length_N=slots.length_N.at[slot].set(start + count)
            )
            scores = self._scores(head, x_BTD[0], targets_P, n_top, scored)
            x_1D = jax.lax.dynamic_slice_in_dim(x_BTD[0], count - 1, 1)
            logits_BV = self._logits(head, x_1D[None])[0]
            live_B = (last & (slots.left_N[slot] > 0))[None]
            return *_draw(slots, slot[None], logits_BV, live_B, n_top), scores

    def _generate(
        self,
        params: Params,
        slots: Slots,
        slots_B: jax.Array | None,
        steps: jax.Array,
        n_top: jax.Array,
        *,
        length: int,
    ) -> tuple[Slots, Drawn]:
        """Up to `steps` (at most MAX_STEPS) tokens for some slots (None: all); (I, B) each.

        Args:
            length: positions of the cache that attention reads: at least those that the last step needs.
        """
        rows_B = jnp.arange(self.n_slots) if slots_B is None else slots_B

        def step(carry: tuple[jax.Array, Slots, Drawn]) -> tuple[jax.Array, Slots, Drawn]:
            i, slots, drawn = carry
            live_B, start_B = slots.live_N[rows_B], slots.length_N[rows_B]
            view = slots.cache.view(slots_B, length, write=live_B)
            tokens_BT = slots.token_N[rows_B][:, None]
            x_BTD, written = self.model.hidden(params, tokens_BT, view, start_B)
            logits_BV = self._logits(self.model.gathered_head(params), x_BTD)[:, 0]
            slots = slots._replace(cache=_written(written), length_N=slots.length_N.at[rows_B].add(live_B))
            slots, new = _draw(slots, rows_B, logits_BV, live_B, n_top)
            return i + 1, slots, jax.tree.map(lambda all, one: all.at[i].set(one), drawn, new)

        with use(self.partition):
            nothing = _nothing(len(rows_B))
            drawn = jax.tree.map(lambda x: jnp.zeros((MAX_STEPS, *x.shape), x.dtype), nothing)
            carry = jnp.int32(0), slots, drawn
            return jax.lax.while_loop(lambda c: (c[0] < steps) & c[1].live_N[rows_B].any(), step, carry)[1:]

    def _logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        return constrain(self.model.logits(head, x_BTD), None, None, None)

    def _scores(
        self, head: Params, x_PD: jax.Array, targets_P: jax.Array, n_top: jax.Array, scored: jax.Array
    ) -> Scores:
        n = next(n for n in (_SCORED, 32, 16, 8, 4, 2, 1) if len(x_PD) % n == 0)

        def some(part: tuple[jax.Array, jax.Array]) -> Scores:
            x_pD, targets_p = part
            logprobs_pV = jax.nn.log_softmax(self._logits(head, x_pD[None])[0])
            logprob_p = jnp.take_along_axis(logprobs_pV, targets_p[:, None], axis=-1)[:, 0]
            return Scores(logprob_p, *likeliest(logprobs_pV, n_top, MAX_TOP_LOGPROBS))

        def all_of_them() -> Scores:
            parts = rearrange(x_PD, "(c p) d -> c p d", p=n), rearrange(targets_P, "(c p) -> c p", p=n)
            return jax.tree.map(lambda x: rearrange(x, "c p ... -> (c p) ..."), jax.lax.map(some, parts))

        abstract = jax.eval_shape(all_of_them)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)
        return jax.lax.cond(scored, all_of_them, lambda: nothing)


def _insert(slots: Slots, slot: jax.Array, request: Request) -> Slots:
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
        seed_N=request.seed,
        options=request.options,
        tokens_NS=request.tokens_S,
        in_prompt_NV=in_prompt_V,
        counts_NV=jnp.zeros(request.bias_V.shape, jnp.int32),
        bias_NV=request.bias_V,
    )
    rows = jax.tree.map(lambda all, one: all.at[slot].set(one), _row_wise(slots), _row_wise(new))
    return rows._replace(cache=slots.cache)


def _row_wise(slots: Slots) -> Slots:
    return slots._replace(cache=None)  # type: ignore[arg-type]


def _copy_cache(slots: Slots, source: jax.Array, target: jax.Array) -> Slots:
    cache = KVCache(*(x.at[:, target].set(x[:, source]) for x in slots.cache))
    return slots._replace(cache=cache)


def _release(slots: Slots, slot: jax.Array) -> Slots:
    return slots._replace(left_N=slots.left_N.at[slot].set(0))


def _draw(
    slots: Slots, rows_B: jax.Array, logits_BV: jax.Array, live_B: jax.Array, n_top: jax.Array
) -> tuple[Slots, Drawn]:
    """The next token of some slots from its logits; slots that are not live stay as they are."""
    length_B, drawn_B, left_B = (x[rows_B] for x in (slots.length_N, slots.drawn_N, slots.left_N))

    def draw() -> Drawn:
        options = _neutral_unless(live_B, jax.tree.map(lambda x: x[rows_B], slots.options))
        seen = Seen(
            *(rows_B, length_B, drawn_B, slots.tokens_NS, slots.in_prompt_NV, slots.counts_NV, slots.bias_NV)
        )
        keys_B = jax.vmap(_key)(slots.seed_N[rows_B], length_B)
        token_B = sample(penalise(logits_BV, options, seen), keys_B, options)
        logprobs_BV = jax.nn.log_softmax(logits_BV)
        logprob_B = jnp.take_along_axis(logprobs_BV, token_B[:, None], axis=-1)[:, 0]
        ended_B = (token_B[:, None] == options.end_BE).any(-1) & live_B
        return Drawn(token_B, logprob_B, *likeliest(logprobs_BV, n_top, MAX_TOP_LOGPROBS), live_B, ended_B)

    drawn = jax.lax.cond(live_B.any(), draw, lambda: _nothing(len(rows_B)))
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


def _neutral_unless(live_B: jax.Array, options: SamplingOptions) -> SamplingOptions:
    """Options that ask for nothing where a slot is not live: what one asked for would be computed for all."""
    off = SamplingOptions(0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, 0, False, 0, -1)  # type: ignore[arg-type]
    return jax.tree.map(
        lambda x, neutral: jnp.where(
            live_B.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.asarray(neutral, x.dtype)
        ),
        options,
        off,
    )


def _nothing(n: int) -> Drawn:
    ids, values = jnp.zeros((n, MAX_TOP_LOGPROBS), jnp.int32), jnp.zeros((n, MAX_TOP_LOGPROBS), jnp.float32)
    no = jnp.zeros((n,), bool)
    return Drawn(ids[:, 0], values[:, 0], ids, values, no, no)


def _written(view: Any) -> KVCache:
    """The cache with what a call wrote, sharded as it was."""
    return KVCache(*(constrain(x, None, None, "heads", None, None) for x in view.cache))
