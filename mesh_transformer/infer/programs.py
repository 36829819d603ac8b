"""The state of all slots on the device, and the jitted programs that update it.

Shapes: N slots, B slots of a call, S positions of a slot, P positions of a prompt chunk, I steps of a call, V
vocabulary rows, D residual width, E stop tokens, W bad words of T tokens, C alternatives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mesh_transformer import platforms
from mesh_transformer.infer.requests import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    OPTIONS,
)
from mesh_transformer.infer.sampling import OptionVectors, PenaltyInputs, most_likely, penalise, sample
from mesh_transformer.models.modules import at_position
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend.cached import KVCache
from mesh_transformer.ops.attend.late import DeferredWriteView
from mesh_transformer.ops.attend.storage import storage
from mesh_transformer.parallel.sharding import Params, constrain, use

# steps in one call of `generate`
MAX_STEPS = 16
# the logits of this many prompt positions are in memory at a time
_SCORED_POSITIONS = 64


class Slots(NamedTuple):
    """The state between calls, on the device. A slot with `left_N` 0 computes nothing.

    Args:
        length_N: int32, valid positions of the cache.
        token_N: int32, the newest token. It is not in the cache yet.
        left_N: int32, tokens that may still be sampled.
        drawn_N: int32, tokens sampled so far.
        min_tokens_N: int32, while `drawn_N` is smaller, no stop token is sampled.
        seed_N: uint32.
        options: a vector (N,) for each sampling option.
        end_NE: int32, the stop tokens, padded with -1.
        biased_N: bool, whether `bias_NV` has a nonzero entry.
        bias_NV: float32, the logit bias, -inf for a token that is not allowed.
        bad_words_NWT: int32, the sequences of tokens to exclude, padded with -1 on the left.
        tokens_NS: int32, the tokens of prompt and completion.
        in_prompt_NV: bool, whether a token is in the prompt.
        counts_NV: int32, occurrences of each token in the completion.
    """

    cache: KVCache
    length_N: jax.Array
    token_N: jax.Array
    left_N: jax.Array
    drawn_N: jax.Array
    min_tokens_N: jax.Array
    seed_N: jax.Array
    options: OptionVectors
    end_NE: jax.Array
    biased_N: jax.Array
    bias_NV: jax.Array
    bad_words_NWT: jax.Array
    tokens_NS: jax.Array
    in_prompt_NV: jax.Array
    counts_NV: jax.Array

    @property
    def live_N(self) -> jax.Array:
        """Bool: the slot has a computed prompt and is not finished."""
        return (self.left_N > 0) & (self.drawn_N > 0)


class SampledTokens(NamedTuple):
    """The next token of each of B slots.

    Args:
        token_B: int32.
        logprob_B: float32, in nats, under the model's distribution before all sampling steps.
        top_id_BC: int32, the most likely tokens. Only the first `n_top` entries are valid.
        top_logprob_BC: float32, their log-probabilities.
        live_B: bool, whether a token was sampled for the slot. The other fields are valid only there.
        ended_B: bool, whether the token is a stop token.
    """

    token_B: jax.Array
    logprob_B: jax.Array
    top_id_BC: jax.Array
    top_logprob_BC: jax.Array
    live_B: jax.Array
    ended_B: jax.Array


class PromptScores(NamedTuple):
    """The scores of given tokens, and the rank of each, int32: how many tokens are at least as likely."""

    scores: Scores
    rank_P: jax.Array

    @classmethod
    def of(cls, logits_PV: jax.Array, tokens_P: jax.Array, n_top: jax.Array) -> PromptScores:
        """See `Scores.of`."""
        logit_P1 = jnp.take_along_axis(logits_PV, tokens_P[:, None], axis=-1)
        rank_P = (logits_PV >= logit_P1).sum(-1, dtype=jnp.int32)
        return cls(Scores.of(logits_PV, tokens_P, n_top), rank_P)


class Scores(NamedTuple):
    """The log-probabilities of given tokens, and the most likely tokens at the same positions. float32, in nats."""

    logprob_P: jax.Array
    top_id_PC: jax.Array
    top_logprob_PC: jax.Array

    @classmethod
    def of(cls, logits_PV: jax.Array, tokens_P: jax.Array, n_top: jax.Array) -> Scores:
        """The scores of `tokens_P` under these logits, with `n_top` alternatives."""
        logprobs_PV = jax.nn.log_softmax(logits_PV)
        logprob_P = jnp.take_along_axis(logprobs_PV, tokens_P[:, None], axis=-1)[:, 0]
        return cls(logprob_P, *most_likely(logprobs_PV, n_top, MAX_TOP_LOGPROBS))


class ChunkBatch(NamedTuple):
    """Prompt chunks of B slots, as numpy arrays. Rows without a chunk are padding.

    Args:
        slots_B: int32, the slot of each chunk, at most one chunk per slot. Any slot in padding rows.
        tokens_BP: int32, padded on the right.
        targets_BP: int32, the token after each position, to be scored.
        start_B: int32, the position of the first token.
        count_B: int32, the number of tokens, 0 in padding rows.
        last_B: bool, whether the chunk is the last of its prompt, so that the first new token is sampled.
    """

    slots_B: Any
    tokens_BP: Any
    targets_BP: Any
    start_B: Any
    count_B: Any
    last_B: Any

    @classmethod
    def none(cls, rows: int, size: int) -> ChunkBatch:
        """A batch of padding: `rows` rows of `size` tokens."""
        slots_B, start_B, count_B = np.zeros((3, rows), np.int32)
        tokens_BP, targets_BP = np.zeros((2, rows, size), np.int32)
        return cls(slots_B, tokens_BP, targets_BP, start_B, count_B, np.zeros(rows, bool))


class SlotPrograms:
    """The jitted functions of one model on one mesh. All of them donate their argument `slots`.

    Args:
        longest_chunk: the largest size of a prompt chunk.
    """

    def __init__(self, placement: Placement, n_slots: int, context: int, *, longest_chunk: int):
        self.model, self.partition, self.n_slots = placement.model, placement.partition, n_slots
        replicated: Any = self.partition.sharding()

        def none() -> Slots:
            with use(self.partition):
                cache = self.model.new_cache(n_slots, context, longest_chunk=longest_chunk)
            return empty(cache, n_slots, context, self.model.decoder.padded_vocab)

        abstract = jax.eval_shape(none)
        self.shardings = shardings = jax.tree.map(lambda _: replicated, abstract)._replace(
            cache=abstract.cache.map(lambda _, names: self.partition.sharding(*names))
        )
        # the result of `empty`
        self.abstract = jax.tree.map(lambda x, split: x.update(sharding=split), abstract, shardings)
        self._counters = jax.jit(lambda: none()[1:], out_shardings=shardings[1:])
        self.insert = jax.jit(insert, donate_argnums=0, out_shardings=shardings)
        self.copy_cache = jax.jit(self._copy_cache, donate_argnums=0, out_shardings=shardings)
        self.release = jax.jit(release, donate_argnums=0, out_shardings=shardings)
        self.prefill = jax.jit(
            self._prefill,
            donate_argnums=1,
            static_argnames=("length", "scored"),
            out_shardings=(shardings, replicated, replicated),
        )
        self.generate = jax.jit(
            self._generate, donate_argnums=1, static_argnames="length", out_shardings=(shardings, replicated)
        )

    def empty(self) -> Slots:
        """The state of slots that are all free. The memory of the cache is taken where it is used, on a CPU."""

        def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            array = jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
            platforms.return_zero_pages(array)
            return array

        return Slots(jax.tree.map(zeros, self.abstract.cache), *self._counters())

    def _copy_cache(self, slots: Slots, source: jax.Array, target: jax.Array, length: jax.Array) -> Slots:
        """Copy the cache of the slot `source` to the slot `target`: the first `length` positions, or more."""
        with use(self.partition):
            cache = slots.cache.copied(source, target, length)
            return slots._replace(cache=cache.map(lambda x, names: constrain(x, *names)))

    def _prefill(
        self, params: Params, slots: Slots, chunks: ChunkBatch, n_top: jax.Array, *, length: int, scored: bool
    ) -> tuple[Slots, SampledTokens, PromptScores | None]:
        """Compute prompt chunks, and sample the first token of each slot whose prompt is complete.

        Args:
            n_top: int32 scalar, alternatives per token.
            length: positions of the cache that attention reads: at least start + P for each row.
            scored: whether to return the PromptScores, (B, P) each.
        """
        rows_B, count_B = chunks.slots_B, chunks.count_B
        with use(self.partition):
            view = slots.cache.view(rows_B, length, write=count_B > 0, ends_B=chunks.start_B + count_B)
            ends_B = jnp.maximum(count_B - 1, 0)
            query_index_B = None if scored else ends_B
            x_BPD, written = self.model.hidden(params, chunks.tokens_BP, view, chunks.start_B, query_index_B)
            # padding rows write to an index after the last slot, which mode="drop" ignores
            to = jnp.where(count_B > 0, rows_B, self.n_slots)
            slots = slots._replace(
                cache=self._written(written),
                length_N=slots.length_N.at[to].set(chunks.start_B + count_B, mode="drop"),
            )
            head = self.model.gathered_head(params)
            scores = self._scores(head, x_BPD, chunks.targets_BP, n_top) if scored else None
            logits_BV = self._logits(head, at_position(x_BPD, ends_B) if scored else x_BPD)[:, 0]
            live_B = chunks.last_B & (count_B > 0) & (slots.left_N[rows_B] > 0)
            return *draw(slots, rows_B, logits_BV, live_B, n_top), scores

    def _generate(
        self,
        params: Params,
        slots: Slots,
        slots_B: jax.Array | None,
        steps: jax.Array,
        n_top: jax.Array,
        *,
        length: int,
    ) -> tuple[Slots, SampledTokens]:
        """Generate up to `steps` tokens, at most MAX_STEPS, for the slots `slots_B`. The tokens are (I, B).

        Args:
            slots_B: int32, or None for all slots.
            length: positions of the cache that attention reads: enough for the last step.
        """
        rows_B = jnp.arange(self.n_slots) if slots_B is None else slots_B

        def step(carry: tuple[jax.Array, Slots, SampledTokens]) -> tuple[jax.Array, Slots, SampledTokens]:
            i, slots, drawn = carry
            live_B, start_B = slots.live_N[rows_B], slots.length_N[rows_B]
            ends_B = jnp.where(live_B, start_B + 1, 0)
            before = slots.cache.view(slots_B, length, write=live_B, ends_B=ends_B)
            view = DeferredWriteView.of(before, start_B) if stored.late else before
            tokens_BT, positions_BT = slots.token_N[rows_B][:, None], None
            if copies > 1:
                tokens_BT, positions_BT = (jnp.repeat(x, copies, axis=1) for x in (tokens_BT, start_B[:, None]))
            # without the barrier, XLA for CPU makes a float32 copy of a bfloat16 table before the loop
            embed, tokens_BT = jax.lax.optimization_barrier((params["embed"], tokens_BT))
            x_BTD, written = self.model.hidden(
                {**params, "embed": embed}, tokens_BT, view, start_B, positions_BT=positions_BT
            )
            logits_BV = self._logits(self.model.gathered_head(params), x_BTD, copies)[:, 0]
            slots = slots._replace(
                cache=self._written(written), length_N=slots.length_N.at[rows_B].add(live_B.astype(jnp.int32))
            )
            slots, new = draw(slots, rows_B, logits_BV, live_B, n_top)
            return i + 1, slots, jax.tree.map(lambda all, row: all.at[i].set(row), drawn, new)

        with use(self.partition):
            stored = storage()
            # rows of a product for each sequence
            copies = -(-stored.rows // len(rows_B))
            nothing = no_tokens(len(rows_B))
            drawn = jax.tree.map(lambda x: jnp.zeros((MAX_STEPS, *x.shape), x.dtype), nothing)
            carry = jnp.int32(0), slots, drawn
            return jax.lax.while_loop(lambda c: (c[0] < steps) & c[1].live_N[rows_B].any(), step, carry)[1:]

    def _logits(self, head: Params, x_BTD: jax.Array, copies: int = 1) -> jax.Array:
        """The logits of all positions on each device; with `copies` equal rows, of the first row only."""
        logits_BTV = self.model.logits(head, x_BTD)
        return constrain(logits_BTV if copies == 1 else logits_BTV[:, :1], None, None, None)

    def _scores(self, head: Params, x_BPD: jax.Array, targets_BP: jax.Array, n_top: jax.Array) -> PromptScores:
        n = next(n for n in (_SCORED_POSITIONS, 32, 16, 8, 4, 2, 1) if targets_BP.size % n == 0)

        def part_scores(part: tuple[jax.Array, jax.Array]) -> PromptScores:
            x_pD, targets_p = part
            return PromptScores.of(self._logits(head, x_pD[None])[0], targets_p, n_top)

        x_CpD, targets_Cp = x_BPD.reshape(-1, n, x_BPD.shape[-1]), targets_BP.reshape(-1, n)
        parts = jax.lax.map(part_scores, (x_CpD, targets_Cp))
        return jax.tree.map(lambda x: x.reshape(*targets_BP.shape, *x.shape[2:]), parts)

    def _written(self, view: Any) -> KVCache:
        """The updated cache, with the shardings of the cache before."""
        return view.cache.map(lambda x, names: constrain(x, *names))


def blank(context: int, vocab: int) -> Slots:
    """One slot of zeros without a cache. The engine fills it in for a request."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros(shape, dtype)

    return Slots(
        cache=None,  # type: ignore[arg-type]
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
        bad_words_NWT=zeros(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS) - 1,
        tokens_NS=zeros(context),
        in_prompt_NV=zeros(vocab, dtype=bool),
        counts_NV=zeros(vocab),
    )


def empty(cache: KVCache, n_slots: int, context: int, vocab: int) -> Slots:
    """Slots without requests."""
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (n_slots, *x.shape)), blank(context, vocab))
    return rows._replace(cache=cache)


def insert(slots: Slots, slot: jax.Array, new: Slots, n_tokens: jax.Array) -> Slots:
    """Assign a slot to a request.

    Args:
        new: the new state of the slot, from `blank`. Its first `length_N` positions are in the slot's cache already.
        n_tokens: length of the prompt, the first tokens of `new.tokens_NS`.
    """
    vocab = len(new.in_prompt_NV)
    at = jnp.where(jnp.arange(len(new.tokens_NS)) < n_tokens, new.tokens_NS, vocab)
    new = new._replace(in_prompt_NV=jnp.zeros(vocab, bool).at[at].set(True, mode="drop"))
    rest = slots._replace(cache=None)  # type: ignore[arg-type]
    rows = jax.tree.map(lambda all, row: all.at[slot].set(row), rest, new)
    return rows._replace(cache=slots.cache)


def release(slots: Slots, slot: jax.Array) -> Slots:
    """Stop sampling for a slot."""
    return slots._replace(left_N=slots.left_N.at[slot].set(0))


# jitted, so that the programs with the same number of rows trace it once
@jax.jit
def draw(
    slots: Slots, rows_B: jax.Array, logits_BV: jax.Array, live_B: jax.Array, n_top: jax.Array
) -> tuple[Slots, SampledTokens]:
    """Sample the next token of the slots `rows_B` from its logits. Slots that are not live do not change."""
    length_B, drawn_B, left_B = (x[rows_B] for x in (slots.length_N, slots.drawn_N, slots.left_N))

    def drawn_now() -> SampledTokens:
        # options of finished slots are turned off: an option that is on in one row is computed for all rows
        options = {
            name: jnp.where(live_B, values_N[rows_B], OPTIONS[name].off) for name, values_N in slots.options.items()
        }
        end_BE = slots.end_NE[rows_B]
        inputs = PenaltyInputs(
            rows_B=rows_B,
            length_B=length_B,
            early_B=live_B & (drawn_B < slots.min_tokens_N[rows_B]),
            end_BE=end_BE,
            biased_B=live_B & slots.biased_N[rows_B],
            bias_NV=slots.bias_NV,
            tokens_NS=slots.tokens_NS,
            in_prompt_NV=slots.in_prompt_NV,
            counts_NV=slots.counts_NV,
            drawn_B=drawn_B,
            # the first word of a request with words
            worded_B=live_B & (slots.bad_words_NWT[rows_B, 0, -1] >= 0),
            bad_words_NWT=slots.bad_words_NWT,
        )
        keys_B = jax.vmap(_key)(slots.seed_N[rows_B], length_B)
        token_B = sample(penalise(logits_BV, options, inputs), keys_B, options)
        ended_B = (token_B[:, None] == end_BE).any(-1) & live_B
        return SampledTokens(token_B, *Scores.of(logits_BV, token_B, n_top), live_B, ended_B)

    drawn = jax.lax.cond(live_B.any(), drawn_now, lambda: no_tokens(len(rows_B)))
    # rows that are not live write to an index after the last slot, which mode="drop" ignores
    to = jnp.where(live_B, rows_B, len(slots.left_N))
    new = slots._replace(
        token_N=slots.token_N.at[to].set(drawn.token_B, mode="drop"),
        left_N=slots.left_N.at[to].set(jnp.where(drawn.ended_B, 0, left_B - 1), mode="drop"),
        drawn_N=slots.drawn_N.at[to].add(1, mode="drop"),
        tokens_NS=slots.tokens_NS.at[to, length_B].set(drawn.token_B, mode="drop"),
        counts_NV=slots.counts_NV.at[to, drawn.token_B].add(1, mode="drop"),
    )
    return new, drawn


def _key(seed: jax.Array, position: jax.Array) -> jax.Array:
    """The random key of a position. It does not depend on the other slots of the batch."""
    return jax.random.fold_in(jax.random.key(seed), position)


def no_tokens(n: int) -> SampledTokens:
    """The result of a step in which no slot is live."""
    ids, values = jnp.zeros((n, MAX_TOP_LOGPROBS), jnp.int32), jnp.zeros((n, MAX_TOP_LOGPROBS), jnp.float32)
    no = jnp.zeros((n,), bool)
    return SampledTokens(ids[:, 0], values[:, 0], ids, values, no, no)
