"""The programs of the server, lowered for devices that are not attached."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesh_transformer.infer.engine import MAX_PREFILL_TOKENS
from mesh_transformer.infer.programs import MAX_STEPS, ChunkBatch, SlotPrograms
from mesh_transformer.models.placement import Placement

NAMES = ("prefill", "decode")
"""The programs, in the order of `programs`."""
LOOPS = {"jit(draw)": 1, "jit(_generate)": MAX_STEPS}
"""The assumed trips of loops that end with the requests: a call samples MAX_STEPS tokens, and a search inside of
sampling takes one step."""


class ServingProgram(NamedTuple):
    """One program.

    Args:
        rows, tokens: sequences and tokens of a call.
        attended: positions that a token attends to, at most.
        params, cache: what it reads, as `jax.ShapeDtypeStruct`.
    """

    name: str
    lowered: jax.stages.Lowered
    rows: int
    tokens: int
    attended: int
    params: Any
    cache: Any


def programs(placement: Placement, slots: int) -> Iterator[ServingProgram]:
    """prefill: the last chunk of a prompt that fills the context. decode: MAX_STEPS tokens of each of `slots`
    sequences, near the end of the context."""
    model = placement.model
    context = model.decoder.seq
    size = min(MAX_PREFILL_TOKENS, context)
    made = SlotPrograms(placement, slots, context, longest_chunk=size)
    params = placement.abstract(model.dtype)
    state = made.abstract
    replicated: Any = placement.partition.sharding()

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), tree)

    number = on_device(jnp.int32(0))
    chunks = on_device(ChunkBatch.none(1, size))
    prefill = made.prefill.lower(params, state, chunks, number, length=context, scored=False)
    yield ServingProgram(NAMES[0], prefill, 1, size, context, params, state.cache)
    decode = made.generate.lower(params, state, None, number, number, length=context)
    yield ServingProgram(NAMES[1], decode, slots, MAX_STEPS * slots, context, params, state.cache)
