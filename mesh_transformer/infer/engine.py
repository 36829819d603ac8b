"""The decoding engine: a model, its weights and a cache of slots. It implements `requests.Engine`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from mesh_transformer.infer.cpu.model import placed
from mesh_transformer.infer.program_table import Generate, Prefill, Program
from mesh_transformer.infer.programs import MAX_STEPS, ChunkBatch, SampledTokens, SlotPrograms, blank
from mesh_transformer.infer.requests import (
    OPTIONS,
    EmittedToken,
    PrefillResult,
    PromptChunk,
    SamplingParams,
    Token,
)
from mesh_transformer.models.placement import Placement
from mesh_transformer.ops.attend.cached import ring_length, segment_ends
from mesh_transformer.ops.attend.storage import storage
from mesh_transformer.parallel.sharding import Params, use

# positions; a smaller chunk takes nearly as long, because all weights are read anyway
MIN_CHUNK = 128
# on a CPU it takes half as long
SHORT_CHUNK = 32
# prompt tokens of one call
MAX_PREFILL_TOKENS = 512
_OneProgram = TypeVar("_OneProgram", bound=Program)


def cache_positions(longest: int, context: int | None) -> int:
    """Positions of a slot: `context`, rounded up to a whole cache segment; at most `longest`, the context of the model,
    which is also the default."""
    ends = segment_ends(longest)
    return next(n for n in ends if n >= min(context or math.inf, ends[-1]))


def abstract_slots(placement: Placement, slots: int, context: int | None) -> Any:
    """The state of all slots of a `SlotEngine` as `jax.ShapeDtypeStruct`, with shardings. Most of it is the cache."""
    positions = cache_positions(placement.model.decoder.seq, context)
    chunk = min(MAX_PREFILL_TOKENS, positions)
    return SlotPrograms(placement, slots, positions, longest_chunk=chunk).abstract


def working_bytes(placement: Placement, slots: int, context: int | None) -> int:
    """Bytes of a device that the programs of a `SlotEngine` need besides weights and cache, at least: the logits of all
    slots, or a chunk's residual stream and the products of its queries and keys in one layer."""
    decoder, positions = placement.model.decoder, cache_positions(placement.model.decoder.seq, context)
    chunk, number = min(MAX_PREFILL_TOKENS, positions), np.dtype(np.float32).itemsize
    heads = max((attention.heads for attention in decoder.attentions), default=0) // placement.size("heads")
    with use(placement.partition):
        keys = min(storage().block or positions, positions)
    of_chunk = chunk * (decoder.d_model + heads * keys)
    return number * max(slots * decoder.padded_vocab, of_chunk)


class SlotEngine:
    """An implementation of `requests.Engine` that needs few compiled programs.

    Chunk sizes are powers of two, and the largest size. On a CPU each program reads as many positions as its call needs
    (`Storage.block`), and one call may compute several chunks. Elsewhere the first chunk of a prompt attends to itself,
    unless it is scored; a later chunk and `generate` read one of the lengths of `segment_ends` or the whole context; a
    scored chunk reads the whole context; one call computes several chunks if each one starts its prompt.

    A program is compiled when it is needed. A subclass may compile elsewhere: see `available`.
    """

    def __init__(
        self,
        placement: Placement,
        params: Params,
        *,
        slots: int,
        context: int | None = None,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
    ):
        """Allocate the cache.

        Args:
            params: parameters in the compute dtype, on the mesh of `placement`, stacked or packed (`infer.cpu`).
            slots: number of sequences in the cache.
            context: positions per sequence, rounded up to a whole cache segment; by default the context of the model.
            max_prefill_tokens: the largest number of prompt tokens in one call.
        """
        self.placement = placement = placed(placement, params)
        model, partition = placement.model, placement.partition
        self.model, self.mesh = model, partition.mesh
        self.slots, self.context = slots, cache_positions(model.decoder.seq, context)
        self.max_prefill_tokens, self._max_chunk = max_prefill_tokens, min(max_prefill_tokens, self.context)
        self.params, self._n_vocab = params, model.decoder.padded_vocab
        windows = {layer.attention.window for layer in model.decoder.layers}
        held = {window: ring_length(self.context, window, self._max_chunk) for window in windows}
        # the window and the positions of each kind of ring
        self._rings = [(window, size) for window, size in held.items() if window and size < self.context]
        with use(partition):
            # whether a program reads as many positions as it needs
            self._any_length = storage().block is not None
        # the attention lengths of compiled programs; the last one is the whole context
        ends = [] if self._any_length else segment_ends(max(held.values()))
        self._lengths = sorted({*ends, self.context})
        # by program; another thread may add to it
        self.compiled: dict[Program, Callable[..., Any]] = {}
        self._programs = SlotPrograms(placement, slots, self.context, longest_chunk=self._max_chunk)
        self._slots = self._programs.empty()
        # for each slot, the end of the positions that were written, with the padding of chunks
        self._ends = [0] * slots
        self._requests: dict[int, _Running] = {}
        self._whole = partition.sharding()
        new = jax.jit(blank, static_argnums=(0, 1), out_shardings=self._whole)
        self._blank = new(self.context, self._n_vocab)

    def load(self, params: Params) -> None:
        """Replace the weights by others of the same shapes and dtype, and empty all slots."""
        self.params, self._slots, self._requests = params, self._programs.empty(), {}
        self._ends = [0] * self.slots

    def unload(self) -> None:
        """Free the memory of the weights and the cache. The next call must be `load`."""
        del self.params, self._slots

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache of all slots, over all devices."""
        return sum(x.nbytes for x in jax.tree.leaves(self._slots.cache))

    def holds(self, slot: int, length: int) -> bool:
        """See `requests.Engine`. A ring of S positions holds the last S that were written."""
        return all(self._ends[slot] - size <= max(0, length - window + 1) for window, size in self._rings)

    def ready(self, start: int, stop: int, scored: bool) -> bool:
        """See `requests.Engine`."""
        return self._alone(start, stop, scored) is not None

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        """See `requests.Engine`."""
        self._ends[slot] = 0 if source is None else self._ends[source]
        if source is not None and source != slot:
            self._slots = self._programs.copy_cache(self._slots, np.int32(source), np.int32(slot), np.int32(reused))
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
            biased_N=np.bool_(params.logit_bias != () or params.allowed_token_ids != ()),
            bias_NV=self._bias(params),
            bad_words_NWT=self._bad_words(params),
            tokens_NS=tokens,
        )
        self._slots = self._programs.insert(self._slots, np.int32(slot), new, np.int32(len(prompt)))

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[PrefillResult]:
        """See `requests.Engine`."""
        results: dict[PromptChunk, PrefillResult] = {}
        for group in self._groups(chunks):
            results.update(zip(group.chunks, self._prefill(group), strict=True))
        return [results[chunk] for chunk in chunks]

    def _groups(self, chunks: Sequence[PromptChunk]) -> Iterator[_Group]:
        """Chunks for one program call: chunks of one size that start their prompts, if they fill more than half of the
        rows."""
        alike: dict[int, list[PromptChunk]] = {}
        for chunk in chunks:
            scored = self._requests[chunk.slot].params.prompt_logprobs is not None
            program = self._alone(chunk.start, chunk.stop, scored)
            assert program is not None, "a chunk whose program is not compiled"
            alone = program.scored or program.length > self._first_length(program.size)
            if alone or self._rows(program.size) == 1:
                yield _Group([chunk], program)
            else:
                alike.setdefault(program.size, []).append(chunk)
        for size, sized_chunks in alike.items():
            together = Prefill(self._rows(size), size, self._first_length(size))
            for first in range(0, len(sized_chunks), together.rows):
                part = sized_chunks[first : first + together.rows]
                if 2 * len(part) > together.rows and self.available(together):
                    yield _Group(part, together)
                else:
                    yield from (_Group([chunk], together._replace(rows=1)) for chunk in part)

    def _alone(self, start: int, stop: int, scored: bool) -> Prefill | None:
        """The program with the least work that computes a chunk alone, of those that are available. If it is not the
        best, the best one is compiled next."""
        programs: list[Prefill] = []
        if not start and not scored:
            programs += (Prefill(1, size, self._first_length(size)) for size in self._sizes(later=False))
        for size in self._sizes(later=True):
            lengths = [self.context] if scored else self._chunk_lengths(size)
            programs += (Prefill(1, size, length, scored) for length in lengths)
        return self._first_available(
            [program for program in programs if program.size >= stop - start and program.length >= stop]
        )

    def _first_available(self, programs: Sequence[_OneProgram]) -> _OneProgram | None:
        """The first program that is available. The very first is compiled next if it is not."""
        for program in programs:
            if self.available(program):
                return program
            if program is programs[0]:
                self.want(program)
        return None

    def available(self, program: Program) -> bool:
        """Whether a program may be called now. Here each one may: the call compiles it."""
        return True

    def want(self, program: Program) -> None:
        """Compile a program next that is not available."""

    def _sizes(self, later: bool) -> list[int]:
        """Chunk sizes: powers of two and the largest size. For `later` chunks (not at the start, or scored) only
        two, where each has several lengths; else the same, with one for the turns of a chat."""
        sizes = [MIN_CHUNK << i for i in range(16) if MIN_CHUNK << i < self._max_chunk]
        if self._any_length:
            return [*(SHORT_CHUNK for _ in sizes[:1]), *sizes, self._max_chunk]
        return [*(sizes[:1] if later else sizes), self._max_chunk]

    def _first_length(self, size: int) -> int:
        """The attention length of a chunk that starts its prompt."""
        return self.context if self._any_length else size

    def _chunk_lengths(self, size: int) -> list[int]:
        """The attention lengths of later chunks. Those of the largest size also have the middle between two lengths: a
        long prompt consists of them, and half of a length is much of its arithmetic."""
        between = [(a + b) // 2 for a, b in itertools.pairwise(self._lengths)] if size == self._max_chunk else []
        return [length for length in sorted([*self._lengths, *between]) if length > size or length == self.context]

    def _rows(self, size: int) -> int:
        """Number of chunks of this size that one program call computes."""
        return max(1, min(self.slots, self.max_prefill_tokens // size))

    def _prefill(self, group: _Group) -> Iterator[PrefillResult]:
        running = [self._requests[chunk.slot] for chunk in group.chunks]
        program = group.program
        arrays = ChunkBatch.none(program.rows, program.size)
        for row, (chunk, request) in enumerate(zip(group.chunks, running, strict=True)):
            count, following = chunk.stop - chunk.start, request.prompt[chunk.start + 1 : chunk.stop + 1]
            arrays.slots_B[row], arrays.start_B[row], arrays.count_B[row] = chunk.slot, chunk.start, count
            arrays.tokens_BP[row, :count] = request.prompt[chunk.start : chunk.stop]
            arrays.targets_BP[row, : len(following)] = following
            arrays.last_B[row] = chunk.stop == len(request.prompt)
            self._ends[chunk.slot] = max(self._ends[chunk.slot], chunk.start + program.size)
        n_top = max(request.params.most_logprobs for request in running)
        self._slots, drawn, scores = self._call(program, arrays, np.int32(n_top))
        if arrays.last_B.any():
            drawn = jax.device_get(drawn)
        for row, (chunk, request) in enumerate(zip(group.chunks, running, strict=True)):
            tokens: list[Token] = []
            if scores is not None:
                following = request.prompt[chunk.start + 1 : chunk.stop + 1]
                of_row, ranks = jax.tree.map(lambda x, row=row: np.asarray(x[row]), scores)
                top = request.params.prompt_logprobs
                tokens = [
                    _token(top, *token, rank=int(rank)) for *token, rank in zip(following, *of_row, ranks, strict=False)
                ]
            first = None
            if arrays.last_B[row]:
                request.length = len(request.prompt)
                drawn_one = jax.tree.map(lambda x, row=row: x[None, row : row + 1], drawn)
                first = next(self._emitted([chunk.slot], {chunk.slot: request}, drawn_one), None)
            yield PrefillResult(first, tokens)

    def generate(self, steps: int) -> Callable[[], list[EmittedToken]] | None:
        """See `requests.Engine`. One call computes at most MAX_STEPS steps."""
        steps = min(steps, MAX_STEPS)
        running = {
            slot: request
            for slot, request in self._requests.items()
            if request.left > request.unread and request.length
        }
        if not running:
            return list
        needed = {slot: min(request.length + request.unread + steps, self.context) for slot, request in running.items()}
        program = self._generator(len(needed) == 1, max(needed.values()))
        if program is None:
            # of the slots for which a program is there, the one with the fewest tokens: it may end first
            slot = min(needed, key=needed.__getitem__)
            program, running = self._generator(True, needed[slot]), {slot: running[slot]}
        if program is None:
            return None
        live = list(running)
        rows = live if program.single else list(range(self.slots))
        n_top = max(request.params.logprobs or 0 for request in running.values())
        slots_B = np.asarray(live, np.int32) if program.single else None
        self._slots, drawn = self._call(program, slots_B, np.int32(steps), np.int32(n_top))
        for request in running.values():
            request.unread += steps

        def read() -> list[EmittedToken]:
            for request in running.values():
                request.unread -= steps
            return list(self._emitted(rows, running, jax.device_get(drawn)))

        return read

    def release(self, slot: int) -> None:
        """See `requests.Engine`."""
        running = self._requests.pop(slot)
        self._ends[slot] = max(self._ends[slot], running.length + min(running.unread, running.left) - 1)
        if running.left > 0:
            self._slots = self._programs.release(self._slots, np.int32(slot))

    def first_programs(self) -> list[Program]:
        """The programs of the beginning of short chats: of a prompt, and of the tokens of all slots."""
        size = next(size for size in self._sizes(later=False) if size >= min(MIN_CHUNK, self._max_chunk))
        return [Prefill(1, size, self._first_length(size)), Generate(single=False, length=self._lengths[0])]

    def programs(self) -> list[Program]:
        """All programs but those that are scored, in the order in which a server needs them.

        After the first programs comes the one for a single chat, which is faster than the one for all slots. Then come
        those that can do the work of all others, because they read the whole context: then longer chats, with their
        later turns, then longer prompts, and prompts that are computed together.
        """
        sizes, later, lengths = self._sizes(later=False), self._sizes(later=True), self._lengths
        programs = [*self.first_programs(), *self._generators(lengths[0])]
        programs += [*self._generators(lengths[-1])[::-1], Prefill(1, sizes[-1], self._first_length(sizes[-1]))]
        programs += (Prefill(1, size, lengths[-1]) for size in later)
        for length in lengths:
            programs += self._generators(length)
            programs += (Prefill(1, size, length) for size in later if size < length)
        programs += (Prefill(1, size, self._first_length(size)) for size in sizes)
        programs += (Prefill(1, size, length) for size in later for length in self._chunk_lengths(size))
        programs += (Prefill(self._rows(size), size, self._first_length(size)) for size in sizes)
        return list(dict.fromkeys(programs))

    def run_once(self) -> None:
        """Run each small program once. No slot may be in use."""
        self.insert(0, [0], SamplingParams(max_tokens=2), source=None, reused=0)
        self.prefill([PromptChunk(0, 0, 1)])
        if read := self.generate(1):
            read()
        self._slots = self._programs.copy_cache(self._slots, np.int32(0), np.int32(0), np.int32(1))
        self._slots = self._programs.release(self._slots, np.int32(0))
        del self._requests[0]
        jax.block_until_ready(self._slots)

    def _generators(self, length: int) -> list[Generate]:
        """The programs that generate with this length: for one slot and for all."""
        return [Generate(single, length) for single in (True, False)[-self.slots :]]

    def _generator(self, single: bool, needed: int) -> Generate | None:
        """The program with the least work that generates with `needed` positions, of those that are available: for one
        slot if it is `single`, or for all."""
        lengths = [length for length in self._lengths if length >= needed]
        programs = itertools.chain.from_iterable(map(self._generators, lengths))
        return self._first_available([program for program in programs if single or not program.single])

    def compile(self, program: Program) -> None:
        """Compile a program, in any thread."""
        if program in self.compiled:
            return
        # another thread replaces the arrays of the slots meanwhile
        params, slots = self.params, self._programs.abstract
        if isinstance(program, Prefill):
            chunks = ChunkBatch.none(program.rows, program.size)
            lowered = self._programs.prefill.lower(
                params, slots, chunks, np.int32(0), length=program.length, scored=program.scored
            )
        else:
            slots_B = np.zeros(1, np.int32) if program.single else None
            lowered = self._programs.generate.lower(
                params, slots, slots_B, np.int32(0), np.int32(0), length=program.length
            )
        self.compiled[program] = lowered.compile()

    def _call(self, program: Program, *arguments: Any) -> Any:
        self.compile(program)
        return self.compiled[program](self.params, self._slots, *arguments)

    def _bias(self, params: SamplingParams) -> Any:
        if not params.logit_bias and not params.allowed_token_ids:
            return self._blank.bias_NV
        bias = np.full(self._n_vocab, -np.inf if params.allowed_token_ids else 0.0, np.float32)
        bias[list(params.allowed_token_ids)] = 0.0
        for token, value in params.logit_bias:
            bias[token] += value
        return jax.device_put(bias, self._whole)

    def _bad_words(self, params: SamplingParams) -> Any:
        if not params.bad_words:
            return self._blank.bad_words_NWT
        words_WT = np.full(self._blank.bad_words_NWT.shape, -1, np.int32)
        for row, word in zip(words_WT, params.bad_words, strict=False):
            row[-len(word) :] = word
        return jax.device_put(words_WT, self._whole)

    def _emitted(
        self, rows: Sequence[int], requests: Mapping[int, _Running], drawn: SampledTokens
    ) -> Iterator[EmittedToken]:
        """The new tokens of the slots `rows`, in order of steps, for those of `requests` that have their slots still.
        The arrays of `drawn` have the shape (I, B)."""
        for step, column in zip(*np.nonzero(drawn.live_B), strict=True):
            slot = rows[column]
            running = requests[slot]
            if self._requests.get(slot) is not running:
                continue
            sampled = jax.tree.map(lambda x, at=(step, column): x[at], drawn)
            # the newest token is not in the cache yet
            self._ends[slot] = max(self._ends[slot], running.length)
            token = _token(
                running.params.logprobs, sampled.token_B, sampled.logprob_B, sampled.top_id_BC, sampled.top_logprob_BC
            )
            yield running.emit(slot, token, ended=bool(sampled.ended_B))


class _Group(NamedTuple):
    """Prompt chunks for one call of a program."""

    chunks: list[PromptChunk]
    program: Prefill


class _Running:
    """The state of a slot's request on the host."""

    def __init__(self, prompt: list[int], params: SamplingParams):
        self.prompt, self.params = prompt, params
        self.left = params.max_tokens
        # tokens of prompt and completion; 0 until the prompt is computed
        self.length = 0
        # steps of calls that were not read yet
        self.unread = 0

    def emit(self, slot: int, token: Token, *, ended: bool) -> EmittedToken:
        """Count a new token."""
        self.length += 1
        self.left = 0 if ended else self.left - 1
        return EmittedToken(slot, token, "stop" if ended else None if self.left else "length")


def _token(n_top: int | None, id: Any, logprob: Any, top_id_C: Any, top_logprob_C: Any, *, rank: int = 0) -> Token:
    """A token with the number of alternatives that the request asks for."""
    top = zip(top_id_C[: n_top or 0].tolist(), top_logprob_C[: n_top or 0].tolist(), strict=True)
    return Token(int(id), float(logprob), tuple(top), rank)
