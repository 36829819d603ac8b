"""Attention to the entries of a cache block by block, as many blocks as a call needs.

Shapes: N slots of a cache, B slots of one call, T query positions, S positions of a block, H heads, J heads of keys and
values, K dims of a head of keys, V of values, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange

from mesh_transformer.ops.attend.causal import attention_logits, fold_heads, unfold_heads
from mesh_transformer.ops.attend.storage import Segment

MakeKeys = Callable[..., Sequence[jax.Array]]
"""Makes keys and values from the arrays of some positions."""


class StoredBlocks(NamedTuple):
    """The entries of one layer in the cache, which are read in blocks of positions.

    Args:
        arrays: (L, N, J, S, K) each.
        slots_B: int32: the slots to read; None for all.
        end: int32: the end of the indices that are read.
        size: the indices of a block.
    """

    arrays: Segment
    layer: jax.Array | int
    slots_B: jax.Array | None
    end: jax.Array
    size: int

    @property
    def blocks(self) -> jax.Array:
        """How many blocks are read."""
        return (self.end + self.size - 1) // self.size

    def block(self, number: jax.Array) -> tuple[Sequence[jax.Array], jax.Array, jax.Array]:
        """The entries of a block, (B, J, size, K) each, their indices, and which of these no block before has."""
        first = number * self.size
        start = jnp.minimum(first, self.arrays[0].shape[3] - self.size)
        keys_S = start + jnp.arange(self.size)
        return [self._read(x, start) for x in self.arrays], keys_S, keys_S >= first

    def _read(self, x: jax.Array, start: jax.Array) -> jax.Array:
        one = self.slots_B is not None and len(self.slots_B) == 1
        place = (self.layer, self.slots_B[0] if self.slots_B is not None and one else 0, 0, start, 0)
        sizes = (1, 1 if one else x.shape[1], x.shape[2], self.size, x.shape[4])
        read = jax.lax.dynamic_slice(x, place, sizes)[0]
        return read if self.slots_B is None or one else read[self.slots_B]


def attend_blocks(
    q_BTHK: jax.Array,
    stored: StoredBlocks,
    mask: Callable[[jax.Array], jax.Array],
    bias_BHTS: jax.Array | None,
    scale: float,
    softcap: float | None,
    make: MakeKeys | None,
) -> jax.Array:
    """softmax(logits) v, block by block: the largest logit, the sum and the mix of the blocks so far go on to the next
    one (Milakov and Gimelshein 2018, arXiv:1805.02867).

    Args:
        mask: gives (B, 1, T, S) for the indices of some keys.
    """

    def keys_and_values(number: jax.Array) -> tuple[Sequence[jax.Array], jax.Array, jax.Array]:
        arrays, keys_S, new_S = stored.block(number)
        return (arrays if make is None else make(*arrays)), keys_S, new_S

    of_block = jax.eval_shape(lambda: keys_and_values(jnp.int32(0))[0])
    shared = q_BTHK.shape[2] // of_block[0].shape[1]
    q_BTHK = fold_heads(q_BTHK, shared)

    def step(number: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top_BHT1, total_BHT1, mixed_BHTV = carry
        keys, keys_S, new_S = keys_and_values(number)
        bias = None if bias_BHTS is None else jax.lax.dynamic_slice_in_dim(bias_BHTS, keys_S[0], stored.size, axis=3)
        logits = attention_logits(q_BTHK, keys[:1], mask(keys_S) & new_S[None, None, None], bias, scale, softcap)
        new_top = jnp.maximum(top_BHT1, logits.max(-1, keepdims=True))
        exp, kept = jnp.exp(logits - new_top), jnp.exp(top_BHT1 - new_top)
        mixed = jnp.matmul(exp.astype(q_BTHK.dtype), keys[-1], preferred_element_type=jnp.float32)
        return new_top, kept * total_BHT1 + exp.sum(-1, keepdims=True), kept * mixed_BHTV + mixed

    (batch, rows, heads, _), width = q_BTHK.shape, of_block[-1].shape[-1]
    row = jnp.zeros((batch, heads, rows, 1), jnp.float32)
    empty = row - jnp.inf, row, jnp.zeros((batch, heads, rows, width), jnp.float32)
    _, total_BHT1, mixed_BHTV = jax.lax.fori_loop(0, stored.blocks, step, empty)
    return unfold_heads(rearrange((mixed_BHTV / total_BHT1).astype(q_BTHK.dtype), "b h t k -> b t h k"), shared)
