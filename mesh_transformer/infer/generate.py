"""Prefill and decode in one program.

Shapes: B sequences, P padded prompt length, S cache length (prompt and new tokens), V vocabulary rows.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.infer.sampling import SamplingOptions, sample
from mesh_transformer.models.base import Model, Params
from mesh_transformer.ops.attention import KVCache
from mesh_transformer.parallel.sharding import Partition, constrain, use


class Generation(NamedTuple):
    """New tokens of B sequences; entries from `count_B` on mean nothing."""

    tokens_BS: jax.Array  # int32
    logprobs_BS: jax.Array  # float32: log-softmax of the raw logits at each token, nats
    count_B: jax.Array  # int32: new tokens, the end-of-text token included


class _Decoding(NamedTuple):
    n_new: jax.Array  # int32: new tokens so far
    cache: KVCache | None
    logits_BV: jax.Array
    written: Generation
    done_B: jax.Array


def bucket(length: int, limit: int) -> int:
    """The padded size for `length`: a power of two from 16 on, at most `limit`. Few sizes mean few compiles."""
    size = 16
    while size < length:
        size *= 2
    return min(size, limit)


class Generator:
    """Generates with one model on one mesh; compiles once for each batch size, prompt and cache bucket."""

    def __init__(self, model: Model, partition: Partition):
        self.model, self.partition = model, partition
        self.generate = jax.jit(self._generate, static_argnames="cache_length")

    def _generate(
        self,
        params: Params,
        prompt_BP: jax.Array,
        length_B: jax.Array,
        max_new: jax.Array,
        seed_B: jax.Array,
        options: SamplingOptions,
        eos: jax.Array,
        *,
        cache_length: int,
    ) -> Generation:
        """Up to `max_new` tokens after each prompt.

        Args:
            params: in the compute dtype.
            prompt_BP: int32, padded on the right; lengths in length_B, each at least 1.
            max_new: int32 scalar; length + max_new is at most cache_length.
            seed_B: PRNG keys; the draw at position p uses fold_in(key, p), whatever else is in the batch.
            eos: int32 scalar: a sequence ends after this token; -1 for none.
            cache_length: positions of the cache.
        """
        with use(self.partition):
            n = prompt_BP.shape[0]
            empty = _constrain_cache(self.model.new_cache(n, cache_length))
            logits, cache = self.model.apply(params, prompt_BP, empty, select_B=length_B - 1)
            tokens = jnp.zeros((n, cache_length), jnp.int32)
            written = Generation(tokens, jnp.zeros(tokens.shape, jnp.float32), jnp.zeros((n,), jnp.int32))
            state = _Decoding(jnp.int32(0), cache, logits[:, 0], written, jnp.zeros((n,), bool))
            step = functools.partial(self._step, params, length_B, seed_B, options, eos)
            return jax.lax.while_loop(lambda s: (s.n_new < max_new) & ~s.done_B.all(), step, state).written

    def _step(
        self,
        params: Params,
        length_B: jax.Array,
        seed_B: jax.Array,
        options: SamplingOptions,
        eos: jax.Array,
        state: _Decoding,
    ) -> _Decoding:
        position_B = length_B + state.n_new
        keys_B = jax.vmap(jax.random.fold_in)(seed_B, position_B)
        token_B = sample(state.logits_BV, keys_B, options)
        logprob_B = jnp.take_along_axis(jax.nn.log_softmax(state.logits_BV), token_B[:, None], axis=-1)[:, 0]
        written = Generation(
            state.written.tokens_BS.at[:, state.n_new].set(token_B),
            state.written.logprobs_BS.at[:, state.n_new].set(logprob_B),
            state.written.count_B + ~state.done_B,
        )
        logits, cache = self.model.apply(params, token_B[:, None], state.cache, start_B=position_B)
        return _Decoding(
            state.n_new + 1, _constrain_cache(cache), logits[:, 0], written, state.done_B | (token_B == eos)
        )


def _constrain_cache(cache: Any) -> KVCache:
    return KVCache(*(constrain(x, None, "batch", "heads", None, None) for x in cache))
