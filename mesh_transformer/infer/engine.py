"""The engine: a model, its weights and a cache of slots, as `requests.Engine` has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mesh_transformer.infer.requests import MAX_STOP_TOKENS, Emitted, Finish, Prefilled, SamplingParams, Token
from mesh_transformer.infer.sampling import SamplingOptions
from mesh_transformer.infer.slots import MAX_STEPS, Drawn, Request, Scores, SlotPrograms
from mesh_transformer.models.base import Model, Params
from mesh_transformer.parallel.sharding import Partition

SHORTEST_PIECE, SHORTEST_READ = 32, 256  # positions


class SlotEngine:
    """See `requests.Engine`. Its programs are few: pieces of prompts and what attention reads come in powers of two."""

    def __init__(self, model: Model, partition: Partition, params: Params, *, slots: int, chunk: int = 512):
        """Allocate the cache.

        Args:
            params: in the compute dtype, on the mesh of `partition`; "blocks" may be a tuple, one tree a layer.
            slots: sequences at a time.
            chunk: longest piece of a prompt that is computed at a time.
        """
        self.slots, self.context = slots, model.config.seq
        self.chunk = min(chunk, self.context)
        self._params, self._n_vocab = params, model.config.padded_vocab
        self._programs = SlotPrograms(model, partition, slots, self.context)
        self._slots = self._programs.empty()
        self._requests: dict[int, _Running] = {}
        self._whole = partition.sharding()
        self._no_bias = jax.device_put(np.zeros(self._n_vocab, np.float32), self._whole)

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        """See `requests.Engine`."""
        if source is not None and source != slot:
            self._slots = self._programs.copy_cache(self._slots, np.int32(source), np.int32(slot))
        self._requests[slot] = _Running(list(prompt), params)
        tokens = np.zeros(self.context, np.int32)
        tokens[: len(prompt)] = prompt
        request = Request(
            tokens,
            np.int32(len(prompt)),
            np.int32(reused),
            np.int32(params.max_tokens),
            np.uint32(params.seed),
            _options(params),
            self._bias(params),
        )
        self._slots = self._programs.insert(self._slots, np.int32(slot), request)

    def prefill(self, slot: int, start: int, stop: int) -> Prefilled:
        """See `requests.Engine`."""
        running = self._requests[slot]
        prompt, wanted = running.prompt, running.params
        piece = min(_power_of_two(stop - start, SHORTEST_PIECE), self.chunk)
        tokens, targets = np.zeros((2, piece), np.int32)
        following = prompt[start + 1 : stop + 1]
        tokens[: stop - start], targets[: len(following)] = prompt[start:stop], following
        n_top = wanted.logprobs or 0
        last = stop == len(prompt)
        self._slots, drawn, scores = self._programs.prefill(
            self._params,
            self._slots,
            np.int32(slot),
            tokens,
            targets,
            np.int32(start),
            np.int32(stop - start),
            np.bool_(last),
            np.int32(n_top),
            np.bool_(wanted.prompt_logprobs),
            length=piece if start == 0 else self.context,
        )
        scored = list(_scored(jax.device_get(scores), following, n_top)) if wanted.prompt_logprobs else []
        if not last:
            return Prefilled(None, scored)
        running.length = len(prompt)
        first = list(self._emitted([slot], jax.tree.map(lambda x: x[None], jax.device_get(drawn))))
        return Prefilled(first[0] if first else None, scored)

    def generate(self, steps: int) -> list[Emitted]:
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
            length=min(_power_of_two(needed, SHORTEST_READ), self.context),
        )
        return list(self._emitted(rows, jax.device_get(drawn)))

    def release(self, slot: int) -> None:
        """See `requests.Engine`."""
        running = self._requests.pop(slot)
        if running.left > 0:
            self._slots = self._programs.release(self._slots, np.int32(slot))

    def warm_up(self, done: Callable[[str], None] = lambda _: None) -> None:
        """Compile every program, by running it; `done` is told what. No slot may be in use."""
        params = SamplingParams(max_tokens=1, temperature=1.0)
        for piece in _powers_of_two(SHORTEST_PIECE, self.chunk):
            for start in (0, 1) if piece < self.context else (0,):
                count = piece - start if piece == self.context else piece
                prompt = [0] * (start + count)
                self.insert(0, prompt, params, source=None, reused=start)
                self.prefill(0, start, len(prompt))
                self.release(0)
                done(f"prefill of {piece} tokens{' after others' if start else ''}")
        for length in _powers_of_two(SHORTEST_READ, self.context):
            for rows in {1, self.slots}:
                self._generate_nothing(rows, length)
                done(f"generate: {rows} slots, {length} positions")
        self._slots = self._programs.copy_cache(self._slots, np.int32(0), np.int32(0))
        self._slots = self._programs.release(self._slots, np.int32(0))
        jax.block_until_ready(self._slots)

    def _generate_nothing(self, rows: int, length: int) -> None:
        slots = np.zeros(1, np.int32) if rows == 1 and self.slots > 1 else None
        self._slots, _ = self._programs.generate(
            self._params, self._slots, slots, np.int32(0), np.int32(0), length=length
        )

    def _bias(self, params: SamplingParams) -> Any:
        if not params.logit_bias:
            return self._no_bias
        bias = np.zeros(self._n_vocab, np.float32)
        for token, value in params.logit_bias:
            bias[token] += value
        return jax.device_put(bias, self._whole)

    def _emitted(self, rows: Sequence[int], drawn: Drawn) -> Iterator[Emitted]:
        """What (I, B) draws of the slots `rows` gave, in order of steps."""
        for step, column in zip(*np.nonzero(drawn.live_B), strict=True):
            slot = rows[column]
            running = self._requests[slot]
            id, logprob = int(drawn.token_B[step, column]), float(drawn.logprob_B[step, column])
            n_top = running.params.logprobs or 0
            top = zip(
                drawn.top_id_BC[step, column, :n_top].tolist(),
                drawn.top_logprob_BC[step, column, :n_top].tolist(),
                strict=True,
            )
            finish = running.count(bool(drawn.ended_B[step, column]))
            yield Emitted(slot, Token(id, logprob, tuple(top)), finish)


class _Running:
    """What the host knows of a slot's request."""

    def __init__(self, prompt: list[int], params: SamplingParams):
        self.prompt, self.params = prompt, params
        self.left = params.max_tokens
        self.length = 0  # tokens so far, once the prompt is computed

    def count(self, ended: bool) -> Finish | None:
        """One more token; how the request ended, if it did."""
        self.length += 1
        self.left = 0 if ended else self.left - 1
        return "stop" if ended else None if self.left else "length"


def _scored(scores: Scores, following: Sequence[int], n_top: int) -> Iterator[Token]:
    ids, values = scores.top_id_PC[:, :n_top].tolist(), scores.top_logprob_PC[:, :n_top].tolist()
    for at, id in enumerate(following):
        yield Token(id, float(scores.logprob_P[at]), tuple(zip(ids[at], values[at], strict=True)))


def _options(params: SamplingParams) -> SamplingOptions:
    ends = np.full(MAX_STOP_TOKENS, -1, np.int32)
    ends[: len(params.stop_token_ids)] = params.stop_token_ids
    values: Any = (
        np.float32(params.temperature),
        np.float32(params.top_p),
        np.int32(params.top_k),
        np.float32(params.min_p),
        np.float32(params.repetition_penalty),
        np.float32(params.presence_penalty),
        np.float32(params.frequency_penalty),
        np.int32(params.no_repeat_ngram),
        np.bool_(bool(params.logit_bias)),
        np.int32(params.min_tokens),
        ends,
    )
    return SamplingOptions(*values)


def _power_of_two(n: int, least: int) -> int:
    return max(least, 1 << (n - 1).bit_length())


def _powers_of_two(least: int, most: int) -> Iterator[int]:
    """least, 2 * least, ... below `most`, then `most`."""
    size = least
    while size < most:
        yield size
        size *= 2
    yield most
