"""The engine: a model, its weights and a cache of slots, as `requests.Engine` has it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mesh_transformer.infer.programs import MAX_STEPS, ChunkBatch, SampledTokens, SlotPrograms, blank
from mesh_transformer.infer.requests import (
    OPTIONS,
    EmittedToken,
    PrefillResult,
    PromptChunk,
    SamplingParams,
    Token,
)
from mesh_transformer.models.model import Params, Placement
from mesh_transformer.ops.attend.cached import segment_ends

MIN_CHUNK = 128  # positions: fewer take nearly as long, the weights are read all the same


class SlotEngine:
    """See `requests.Engine`. Its programs are few: chunks of prompts come in powers of two, what attention reads in the
    segments of the cache, and chunks that begin their prompts are computed several at a time."""

    def __init__(
        self,
        placement: Placement,
        params: Params,
        *,
        slots: int,
        context: int | None = None,
        max_prefill_tokens: int = 512,
    ):
        """Allocate the cache.

        Args:
            params: in the compute dtype, on the mesh of `placement`; "blocks" may be a tuple, one tree a layer.
            slots: sequences at a time.
            context: positions that a sequence needs, at least; None: all that the model has.
            max_prefill_tokens: tokens of prompts that are computed at a time.
        """
        model, partition = placement.model, placement.partition
        self.model, self.mesh = model, partition.mesh
        ends = segment_ends(model.decoder.seq)
        self.slots, self.context = slots, next(n for n in ends if n >= min(context or math.inf, ends[-1]))
        self.max_prefill_tokens, self._max_chunk = max_prefill_tokens, min(max_prefill_tokens, self.context)
        self._params, self._n_vocab = params, model.decoder.padded_vocab
        self._programs = SlotPrograms(
            placement, slots, self.context, stacked=not isinstance(params["blocks"], tuple)
        )
        self._slots = self._programs.empty()
        self._requests: dict[int, _Running] = {}
        self._whole = partition.sharding()
        new = jax.jit(blank, static_argnums=(0, 1), out_shardings=self._whole)
        self._blank = new(self.context, self._n_vocab)

    def load(self, params: Params) -> None:
        """Begin again with other weights of the same kind, and empty slots."""
        self._params, self._slots, self._requests = params, self._programs.empty(), {}

    def unload(self) -> None:
        """Let go of weights and cache: nothing but `load` may follow."""
        del self._params, self._slots

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        """See `requests.Engine`."""
        if source is not None and source != slot:
            self._slots = self._programs.copy_cache(self._slots, np.int32(source), np.int32(slot))
        self._requests[slot] = _Running(list(prompt), params)
        tokens, ends = np.zeros(self.context, np.int32), np.full(self._blank.end_NE.shape, -1, np.int32)
        tokens[: len(prompt)] = prompt
        ends[: len(params.stop_token_ids)] = params.stop_token_ids
        new = self._blank._replace(
            length_N=np.int32(reused),
            left_N=np.int32(params.max_tokens),
            min_tokens_N=np.int32(params.min_tokens),
            seed_N=np.uint32(params.seed),
            options={name: np.asarray(value, OPTIONS[name].dtype) for name, value in params.options.items()},
            end_NE=ends,
            biased_N=np.bool_(params.logit_bias != ()),
            bias_NV=self._bias(params),
            tokens_NS=tokens,
        )
        self._slots = self._programs.insert(self._slots, np.int32(slot), new, np.int32(len(prompt)))

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[PrefillResult]:
        """See `requests.Engine`."""
        found: dict[PromptChunk, PrefillResult] = {}
        for group in self._groups(chunks):
            found.update(zip(group.chunks, self._prefill(group), strict=True))
        return [found[chunk] for chunk in chunks]

    def _groups(self, chunks: Sequence[PromptChunk]) -> Iterator[_Group]:
        """Chunks that one program computes: those that begin a prompt, of one size, if they fill half of its rows."""
        alike: dict[int, list[PromptChunk]] = {}
        for chunk in chunks:
            scored = self._requests[chunk.slot].params.prompt_logprobs
            later = chunk.start > 0 or scored
            size = next(n for n in self._sizes(later) if n >= chunk.stop - chunk.start)
            if later or self._rows(size) == 1:
                yield _Group([chunk], 1, size, self.context if later else size, scored)
            else:
                alike.setdefault(size, []).append(chunk)
        for size, some in alike.items():
            rows = self._rows(size)
            for first in range(0, len(some), rows):
                part = some[first : first + rows]
                if 2 * len(part) > rows:
                    yield _Group(part, rows, size, size)
                else:
                    yield from (_Group([chunk], 1, size, size) for chunk in part)

    def _sizes(self, later: bool) -> list[int]:
        """Of chunks: powers of two, and the longest; only two of those that begin `later` in a prompt, or are scored."""
        sizes = [MIN_CHUNK << i for i in range(16) if MIN_CHUNK << i < self._max_chunk]
        return [*(sizes[:1] if later else sizes), self._max_chunk]

    def _rows(self, size: int) -> int:
        """Chunks of a size that one program computes."""
        return max(1, min(self.slots, self.max_prefill_tokens // size))

    def _prefill(self, group: _Group) -> Iterator[PrefillResult]:
        running = [self._requests[chunk.slot] for chunk in group.chunks]
        arrays = ChunkBatch.none(group.rows, group.size)
        for row, (chunk, request) in enumerate(zip(group.chunks, running, strict=True)):
            count, following = chunk.stop - chunk.start, request.prompt[chunk.start + 1 : chunk.stop + 1]
            arrays.slots_B[row], arrays.start_B[row], arrays.count_B[row] = chunk.slot, chunk.start, count
            arrays.tokens_BP[row, :count] = request.prompt[chunk.start : chunk.stop]
            arrays.targets_BP[row, : len(following)] = following
            arrays.last_B[row] = chunk.stop == len(request.prompt)
        n_top = max(request.params.logprobs or 0 for request in running)
        self._slots, drawn, scores = self._programs.prefill(
            self._params, self._slots, arrays, np.int32(n_top), length=group.length, scored=group.scored
        )
        if arrays.last_B.any():
            drawn = jax.device_get(drawn)
        for row, (chunk, request) in enumerate(zip(group.chunks, running, strict=True)):
            tokens: list[Token] = []
            if scores is not None:
                following = request.prompt[chunk.start + 1 : chunk.stop + 1]
                of_row = jax.tree.map(lambda x, row=row: np.asarray(x[row]), scores)
                tokens = [_token(request.params, *each) for each in zip(following, *of_row, strict=False)]
            first = None
            if arrays.last_B[row]:
                request.length = len(request.prompt)
                drawn_one = jax.tree.map(lambda x, row=row: x[None, row : row + 1], drawn)
                first = next(self._emitted([chunk.slot], drawn_one), None)
            yield PrefillResult(first, tokens)

    def generate(self, steps: int) -> list[EmittedToken]:
        """See `requests.Engine`. At most MAX_STEPS."""
        live = [slot for slot, running in self._requests.items() if running.left > 0 and running.length]
        if not live:
            return []
        one = len(live) == 1
        rows = live if one else list(range(self.slots))
        needed = max(self._requests[slot].length for slot in live) + steps
        n_top = max(self._requests[slot].params.logprobs or 0 for slot in live)
        self._slots, drawn = self._programs.generate(
            self._params,
            self._slots,
            np.asarray(live, np.int32) if one and self.slots > 1 else None,
            np.int32(min(steps, MAX_STEPS)),
            np.int32(n_top),
            length=next(end for end in segment_ends(self.context) if end >= min(needed, self.context)),
        )
        return list(self._emitted(rows, jax.device_get(drawn)))

    def release(self, slot: int) -> None:
        """See `requests.Engine`."""
        running = self._requests.pop(slot)
        if running.left > 0:
            self._slots = self._programs.release(self._slots, np.int32(slot))

    def programs(self) -> list[Callable[[], Any]]:
        """One call for each program, which compiles it; the first three are enough for a short prompt's first tokens."""
        prefills, generates = list(self._every_prefill()), list(self._every_generate())
        return [*prefills[:1], *generates[:2], *prefills[1:], *generates[2:]]

    def run_once(self) -> None:
        """Run what every request needs. No slot may be in use."""
        self.insert(0, [0], SamplingParams(max_tokens=2), source=None, reused=0)
        self.prefill([PromptChunk(0, 0, 1)])
        self.generate(1)
        self._slots = self._programs.copy_cache(self._slots, np.int32(0), np.int32(0))
        self._slots = self._programs.release(self._slots, np.int32(0))
        del self._requests[0]
        jax.block_until_ready(self._slots)

    def _every_prefill(self) -> Iterator[Callable[[], Any]]:
        """The programs that `_groups` asks for."""
        begin = {(rows, n, n, False) for n in self._sizes(later=False) for rows in (1, self._rows(n))}
        later = {(1, n, self.context, scored) for n in self._sizes(later=True) for scored in (False, True)}
        for rows, size, length, scored in sorted(begin | later):
            given = ChunkBatch.none(rows, size), np.int32(0)
            yield self._compiler(self._programs.prefill, *given, length=length, scored=scored)

    def _every_generate(self) -> Iterator[Callable[[], Any]]:
        for length in segment_ends(self.context):
            for slots in (np.zeros(1, np.int32), None)[-self.slots :]:
                given = slots, np.int32(0), np.int32(0)
                yield self._compiler(self._programs.generate, *given, length=length)

    def _compiler(self, program: Any, *given: Any, **static: Any) -> Callable[[], Any]:
        return lambda: program.lower(self._params, self._slots, *given, **static).compile()

    def _bias(self, params: SamplingParams) -> Any:
        if not params.logit_bias:
            return self._blank.bias_NV
        bias = np.zeros(self._n_vocab, np.float32)
        for token, value in params.logit_bias:
            bias[token] += value
        return jax.device_put(bias, self._whole)

    def _emitted(self, rows: Sequence[int], drawn: SampledTokens) -> Iterator[EmittedToken]:
        """What (I, B) draws of the slots `rows` gave, in order of steps."""
        for step, column in zip(*np.nonzero(drawn.live_B), strict=True):
            slot = rows[column]
            running = self._requests[slot]
            one = jax.tree.map(lambda x, at=(step, column): x[at], drawn)
            token = _token(running.params, one.token_B, one.logprob_B, one.top_id_BC, one.top_logprob_BC)
            yield running.emit(slot, token, ended=bool(one.ended_B))


class _Group(NamedTuple):
    """Chunks for one program of so many rows, tokens a row, and positions that attention reads."""

    chunks: list[PromptChunk]
    rows: int
    size: int
    length: int
    scored: bool = False


class _Running:
    """What the host knows of a slot's request."""

    def __init__(self, prompt: list[int], params: SamplingParams):
        self.prompt, self.params = prompt, params
        self.left = params.max_tokens
        self.length = 0  # tokens so far, once the prompt is computed

    def emit(self, slot: int, token: Token, *, ended: bool) -> EmittedToken:
        """Count one more token."""
        self.length += 1
        self.left = 0 if ended else self.left - 1
        return EmittedToken(slot, token, "stop" if ended else None if self.left else "length")


def _token(params: SamplingParams, id: Any, logprob: Any, top_id_C: Any, top_logprob_C: Any) -> Token:
    """A token with as many alternatives as were asked for."""
    wanted = slice(params.logprobs or 0)
    top = zip(top_id_C[wanted].tolist(), top_logprob_C[wanted].tolist(), strict=True)
    return Token(int(id), float(logprob), tuple(top))
