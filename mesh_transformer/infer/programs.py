"""The programs of the engine: what a device does with the slots of a cache.

Shapes: N slots, B of them that a call works on, P positions of a piece of a prompt, I steps of a call, V vocabulary rows,
D residual width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.infer.requests import MAX_TOP_LOGPROBS
from mesh_transformer.infer.sampling import likeliest
from mesh_transformer.infer.slots import (
    Drawn,
    Scores,
    Slots,
    copy_cache,
    draw,
    empty,
    insert,
    nothing_drawn,
    release,
)
from mesh_transformer.models.decoder import at_position
from mesh_transformer.models.model import Params
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend.cached import KVCache
from mesh_transformer.parallel.sharding import constrain, use

MAX_STEPS = 16  # of a call of `generate`
_SCORED = 64  # positions of prompts whose logits exist at a time


class Pieces(NamedTuple):
    """Pieces of the prompts of B slots, as `prefill` takes them: host arrays."""

    slots_B: Any  # int32, each once; what stands where there is no piece is any slot
    tokens_BP: Any  # int32, padded on the right
    targets_BP: Any  # int32: the token after each, whose log-probability is wanted
    start_B: Any  # int32: position of the first
    count_B: Any  # int32: of them that are not padding; 0: no piece
    last_B: Any  # bool: the piece is its prompt's last, so that a token is drawn


class SlotPrograms:
    """The jitted functions of one model on one mesh. `slots` is donated everywhere.

    Args:
        stacked: the layers of the parameters are, not a tuple of layers.
    """

    def __init__(self, placement: Placement, n_slots: int, context: int, *, stacked: bool):
        self.model, self.partition, self.n_slots = placement.model, placement.partition, n_slots
        whole: Any = self.partition.sharding()

        def none() -> Slots:
            cache = self.model.new_cache(n_slots, context, stacked=stacked)
            return empty(cache, n_slots, context, self.model.decoder.padded_vocab)

        abstract = jax.eval_shape(none)
        shardings = jax.tree.map(lambda _: whole, abstract)._replace(
            cache=self.model.map_cache(lambda _, names: self.partition.sharding(*names), abstract.cache)
        )
        self.empty = jax.jit(none, out_shardings=shardings)
        self.insert = jax.jit(insert, donate_argnums=0, out_shardings=shardings)
        self.copy_cache = jax.jit(copy_cache, donate_argnums=0, out_shardings=shardings)
        self.release = jax.jit(release, donate_argnums=0, out_shardings=shardings)
        self.prefill = jax.jit(
            self._prefill,
            donate_argnums=1,
            static_argnames=("length", "scored"),
            out_shardings=(shardings, whole, whole),
        )
        self.generate = jax.jit(
            self._generate, donate_argnums=1, static_argnames="length", out_shardings=(shardings, whole)
        )

    def _prefill(
        self,
        params: Params,
        slots: Slots,
        pieces: Pieces,
        n_top: jax.Array,
        *,
        length: int,
        scored: bool,
    ) -> tuple[Slots, Drawn, Scores | None]:
        """Compute pieces of prompts, and draw the first token of each slot whose prompt ends there.

        Args:
            n_top: int32 scalar: alternatives that are wanted with each token.
            length: positions of the cache that attention reads; at least start + P, or P where every `start` is 0.
            scored: whether the Scores, (B, P) each, are wanted.
        """
        rows_B, count_B = pieces.slots_B, pieces.count_B
        with use(self.partition):
            view = slots.cache.view(rows_B, length, write=count_B > 0)
            ends_B = jnp.maximum(count_B - 1, 0)
            query_index_B = None if scored else ends_B
            x_BPD, written, _ = self.model.hidden(
                params, pieces.tokens_BP, view, pieces.start_B, query_index_B
            )
            to = jnp.where(count_B > 0, rows_B, self.n_slots)  # one beyond the last slot is dropped
            slots = slots._replace(
                cache=self._written(written),
                length_N=slots.length_N.at[to].set(pieces.start_B + count_B, mode="drop"),
            )
            head = self.model.gathered_head(params)
            scores = self._scores(head, x_BPD, pieces.targets_BP, n_top) if scored else None
            logits_BV = self._logits(head, at_position(x_BPD, ends_B) if scored else x_BPD)[:, 0]
            live_B = pieces.last_B & (count_B > 0) & (slots.left_N[rows_B] > 0)
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
            x_BTD, written, _ = self.model.hidden(params, tokens_BT, view, start_B)
            logits_BV = self._logits(self.model.gathered_head(params), x_BTD)[:, 0]
            slots = slots._replace(
                cache=self._written(written), length_N=slots.length_N.at[rows_B].add(live_B)
            )
            slots, new = draw(slots, rows_B, logits_BV, live_B, n_top)
            return i + 1, slots, jax.tree.map(lambda all, one: all.at[i].set(one), drawn, new)

        with use(self.partition):
            nothing = nothing_drawn(len(rows_B))
            drawn = jax.tree.map(lambda x: jnp.zeros((MAX_STEPS, *x.shape), x.dtype), nothing)
            carry = jnp.int32(0), slots, drawn
            return jax.lax.while_loop(lambda c: (c[0] < steps) & c[1].live_N[rows_B].any(), step, carry)[1:]

    def _logits(self, head: Params, x_BTD: jax.Array) -> jax.Array:
        return constrain(self.model.logits(head, x_BTD), None, None, None)

    def _scores(self, head: Params, x_BPD: jax.Array, targets_BP: jax.Array, n_top: jax.Array) -> Scores:
        n = next(n for n in (_SCORED, 32, 16, 8, 4, 2, 1) if targets_BP.size % n == 0)

        def some(part: tuple[jax.Array, jax.Array]) -> Scores:
            x_pD, targets_p = part
            logprobs_pV = jax.nn.log_softmax(self._logits(head, x_pD[None])[0])
            logprob_p = jnp.take_along_axis(logprobs_pV, targets_p[:, None], axis=-1)[:, 0]
            return Scores(logprob_p, *likeliest(logprobs_pV, n_top, MAX_TOP_LOGPROBS))

        x_CpD, targets_Cp = x_BPD.reshape(-1, n, x_BPD.shape[-1]), targets_BP.reshape(-1, n)
        parts = jax.lax.map(some, (x_CpD, targets_Cp))
        return jax.tree.map(lambda x: x.reshape(*targets_BP.shape, *x.shape[2:]), parts)

    def _written(self, view: Any) -> KVCache:
        """The cache with what a call wrote, sharded as it was."""
        return self.model.map_cache(lambda x, names: constrain(x, *names), view.cache)
