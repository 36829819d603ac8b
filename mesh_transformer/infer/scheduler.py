"""Continuous batching: decides which tokens of which requests an `Engine` computes next, and in which slots. No jax.

A request is one sequence here: one of the server's requests may be several.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from mesh_transformer import liveness
from mesh_transformer.infer.requests import (
    EmittedToken,
    Engine,
    FinishReason,
    PromptChunk,
    SamplingParams,
    Token,
)

# clients whose last slot is known
_MOST_SERVED = 10_000
# while requests wait, the longest step: one of them may get the slot of a request that ends at a stop token
WAITING_S = 0.1


class QueueFull(Exception):
    """The queue holds `max_queue` requests already."""


@dataclasses.dataclass
class RequestOutput:
    """The result of one step for one request.

    Args:
        request: the ID from `submit`.
        tokens: new tokens. If `finish_reason` is "stop", the last one is the stop token.
        prompt: the prompt's tokens that this step scored, if the request has `prompt_logprobs`. The prompt's first
            token has no score.
        finish_reason: set in the last output of a request.
    """

    request: int
    tokens: list[Token] = dataclasses.field(default_factory=list)
    prompt: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None


class SchedulerStats(NamedTuple):
    """Gauges, and counters since the start.

    Args:
        running: requests in a slot.
        waiting: requests without a slot.
        prompt_tokens: counter, prompt tokens of admitted requests.
        prefilled_tokens: counter, prompt tokens that were computed.
        reused_tokens: counter, prompt tokens that came from the cache of an earlier request.
        generated_tokens: counter.
        cached_tokens: computed positions, over all slots.
        positions: positions of the context, over all slots.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    positions: int = 0


@dataclasses.dataclass
class _Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    on_admit: Callable[[], None] | None
    client: Hashable = None
    # parameters of the continuation after the context is full
    rest: SamplingParams | None = None


@dataclasses.dataclass
class _Slot:
    """A slot of the engine.

    Args:
        request: None if the slot is free.
        tokens: the newest sequence of the slot. A free slot keeps it.
        cached: how many of `tokens` are in the cache.
        last_used: counter value of the newest release, or of the newest copy from this slot.
    """

    index: int
    request: _Request | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0
    last_used: int = 0


class _Call(NamedTuple):
    """A call of `Engine.generate`."""

    steps: int
    read: Callable[[], list[EmittedToken]]


class Scheduler:
    """Schedules requests on an engine. A slot goes to the client with the fewest running requests, and of clients with
    as many to the one whose last slot is longest ago; of a client, the first request comes first. A prefix that is in
    the cache of a slot is reused.

    A step computes at most `engine.max_prefill_tokens` prompt tokens: a chunk of one prompt, then whole prompts that
    fit in the rest. A request gets its slot when its prefill starts. So requests with the same prompt find the prefix
    that the first of them computed.

    Only one thread may use a scheduler. `step` passes on the exceptions of the engine. After one, the scheduler is
    unusable.

    Args:
        engine: the engine. Only this scheduler may use it.
        max_queue: how many requests may wait, in addition to those for which a slot is free.
        max_steps: tokens per request and step while no request can be admitted. A request that arrives meanwhile waits
            for the whole step.
        min_copy: a prefix with fewer tokens is computed again instead of copied from another slot.
        clock: seconds: while requests wait, a step takes at most WAITING_S. None: steps have no limit in time.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_queue: int,
        max_steps: int = 8,
        min_copy: int = 8,
        clock: Callable[[], float] | None = None,
    ):
        self._engine, self._time = engine, clock or (lambda: 0.0)
        # of a token of all running requests, in the last step; None: no clock, or a clock that did not go on
        self._token_s: float | None = None
        # the call that was started before the last one was read, and when that was
        self._next_call: _Call | None = None
        self._read_at = 0.0
        # whether the last step had nothing to do until a program is compiled
        self.waits = False
        self._max_queue, self._max_steps, self._min_copy = max_queue, max_steps, min_copy
        # in order of arrival
        self._waiting: dict[int, _Request] = {}
        # how many requests of each client wait, and when it got its last slot
        self._waiting_of: collections.Counter[Hashable] = collections.Counter()
        self._served: dict[Hashable, int] = {}
        self._slots = [_Slot(index) for index in range(engine.slots)]
        self._prefilling: list[_Slot] = []
        self._clock = itertools.count(1)
        # the counters of `SchedulerStats`
        self._counters: collections.Counter[str] = collections.Counter()

    def submit(
        self,
        request: int,
        prompt: Sequence[int],
        params: SamplingParams,
        on_admit: Callable[[], None] | None = None,
        *,
        slide: bool = False,
        client: Hashable = None,
    ) -> None:
        """Queue a request. Later steps return its tokens.

        Args:
            request: an ID that no waiting or running request has.
            prompt: token IDs, at least one.
            on_admit: called in the step in which the request gets its slot.
            slide: allow a prompt and a completion that are longer than the context together. Only the end of a long
                prompt is used. When the context is full, the last half of it is queued as a new prompt, and the
                penalties count its tokens as a prompt. Not supported with `prompt_logprobs`.
            client: whose request it is.

        Raises:
            QueueFull: `max_queue` requests wait already.
            ValueError: the prompt is empty, the prompt and `max_tokens` exceed the context, or the ID is in use.
        """
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if not slide and len(prompt) + params.max_tokens > self._engine.context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}: the sum is "
                f"{len(prompt) + params.max_tokens}, more than the context of {self._engine.context}"
            )
        if request in self._waiting or any(s.request and s.request.id == request for s in self._slots):
            raise ValueError(f"the ID {request} is in use by another request")
        if len(self._waiting) >= self._max_queue + len(self._free()):
            raise QueueFull(f"the queue is full: {self._max_queue} requests wait already")
        queued = _Request(request, list(prompt), params, on_admit, client)
        self._queue(_window(queued, self._engine.context) if slide else queued)

    def cancel(self, request: int) -> None:
        """Drop a waiting or running request and free its slot. Unknown IDs are ignored."""
        if request in self._waiting:
            self._dequeue(request)
        for slot in self._slots:
            if slot.request is not None and slot.request.id == request:
                self._release(slot)

    def step(self) -> list[RequestOutput]:
        """Compute prompt chunks and one token of each running request, or several tokens of each if no request can be
        admitted before.

        Returns:
            An output for each request that has new tokens or is finished. Empty if there are no requests, or if all of
            them wait for programs (`waits`).
        """
        outputs: dict[int, RequestOutput] = {}
        while self._admit():
            pass
        chunks = self._chunks()
        blocked = bool(chunks or (self._waiting and self._free()))
        if chunks:
            self._prefill(chunks, outputs)
        self.waits = not chunks and not self.idle
        for emitted in self._generate(blocked):
            slot = self._slots[emitted.slot]
            # this step wrote the previous token to the cache
            slot.cached += 1
            self._record_token(slot, emitted, outputs)
        return list(outputs.values())

    def _most_steps(self, left: Sequence[int]) -> int:
        """Tokens of each running request until something else can be done: until all have ended, or, while requests
        wait, the first of them, and at most WAITING_S.

        Args:
            left: tokens that each running request may still get.
        """
        if not self._waiting:
            return min(self._max_steps, max(left))
        in_time = self._max_steps if self._token_s is None else int(WAITING_S / self._token_s)
        return max(1, min(self._max_steps, min(left), in_time))

    def _generate(self, blocked: bool) -> list[EmittedToken]:
        """The tokens of a call for the running requests. Measures the time of a token.

        With no slot free, the next call is started before this one is read, so that the device computes while the host
        works on the tokens: unless this call may finish a request, or both together take longer than WAITING_S.

        Args:
            blocked: something else can be done after one token.
        """
        left = [
            slot.request.params.max_tokens - (len(slot.tokens) - len(slot.request.prompt))
            for slot in self._slots
            if slot.request is not None and slot not in self._prefilling
        ]
        call, self._next_call = self._next_call, None
        if not left:
            return []
        # a prompt was computed since the call before was read
        measured = call is None or not blocked
        began = self._read_at if call else self._time()
        call = call or self._start(1 if blocked else self._most_steps(left))
        if call is None:
            return []
        self.waits = False
        if not blocked and not self._free() and min(left) > call.steps:
            steps = self._most_steps([each - call.steps for each in left])
            if (call.steps + steps) * (self._token_s or 0.0) <= WAITING_S:
                self._next_call = self._start(steps)
        tokens = call.read()
        self._read_at = self._time()
        if measured:
            self._token_s = (self._read_at - began) / call.steps or None
        return tokens

    def _start(self, steps: int) -> _Call | None:
        read = self._engine.generate(steps)
        return None if read is None else _Call(steps, read)

    def run(self) -> Iterator[RequestOutput]:
        """The outputs of all steps, until all requests are finished."""
        while not self.idle:
            outputs = self.step()
            # the watchdog does not see work on a device
            liveness.record_progress()
            yield from outputs

    @property
    def idle(self) -> bool:
        """No request waits or runs."""
        return not self._waiting and len(self._free()) == len(self._slots)

    @property
    def stats(self) -> SchedulerStats:
        """The current counters and gauges."""
        return SchedulerStats(
            running=len(self._slots) - len(self._free()),
            waiting=len(self._waiting),
            slots=len(self._slots),
            **self._counters,
            cached_tokens=sum(slot.cached for slot in self._slots),
            positions=len(self._slots) * self._engine.context,
        )

    def _free(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.request is None]

    def _admit(self) -> bool:
        """Give the next waiting request a slot, if one is free and its prompt is the first of this step, or fits."""
        if not self._waiting or not self._free():
            return False
        request = self._next()
        slot, source, reused = self._choose_slot(request)
        if self._prefilling and not self._fits(request, reused):
            return False
        self._dequeue(request.id)
        if len(self._served) >= _MOST_SERVED:
            self._served.clear()
        self._served[request.client] = next(self._clock)
        self._engine.insert(
            slot.index, request.prompt, request.params, source=source.index if source else None, reused=reused
        )
        slot.request, slot.tokens, slot.cached = request, list(request.prompt), reused
        if source is not None:
            source.last_used = next(self._clock)
        self._prefilling.append(slot)
        self._counters["prompt_tokens"] += len(request.prompt)
        self._counters["reused_tokens"] += reused
        if request.on_admit is not None:
            request.on_admit()
        return True

    def _next(self) -> _Request:
        """The first waiting request of the client with the fewest running requests."""
        running = collections.Counter(slot.request.client for slot in self._slots if slot.request is not None)
        # in order of arrival, the first request of each client
        first: dict[Hashable, _Request] = {}
        for request in self._waiting.values():
            first.setdefault(request.client, request)
            if len(first) == len(self._waiting_of):
                break
        return min(first.values(), key=lambda each: (running[each.client], self._served.get(each.client, 0)))

    def _queue(self, request: _Request) -> None:
        self._waiting[request.id] = request
        self._waiting_of[request.client] += 1

    def _dequeue(self, id: int) -> None:
        client = self._waiting.pop(id).client
        self._waiting_of[client] -= 1
        if not self._waiting_of[client]:
            del self._waiting_of[client]

    def _fits(self, request: _Request, reused: int) -> bool:
        """Whether a prompt can join this step: as a whole, and if no prompt that is being computed will give it a
        prefix of `min_copy` tokens that is longer than the one it reuses."""
        # not those that wait for a program
        slots = [slot for slot in self._prefilling if self._chunk(slot, self._engine.max_prefill_tokens)]
        if not slots:
            return True
        prefilling = [slot.request.prompt for slot in slots if slot.request is not None]
        left = sum(len(slot.tokens) - slot.cached for slot in slots)
        if left + len(request.prompt) - reused > self._engine.max_prefill_tokens:
            return False
        longest = max(min(_common_length(prompt, request.prompt), len(request.prompt) - 1) for prompt in prefilling)
        return request.params.prompt_logprobs is not None or longest < max(self._min_copy, reused + 1)

    def _choose_slot(self, request: _Request) -> tuple[_Slot, _Slot | None, int]:
        """A free slot for a request, the slot that holds a prefix of its prompt, and the length of the prefix."""
        free = sorted(self._free(), key=lambda slot: slot.last_used)
        # prompt_logprobs need the whole prompt to be computed
        if request.params.prompt_logprobs is not None:
            return free[0], None, 0
        common = [min(_common_length(slot.tokens, request.prompt), slot.cached) for slot in self._slots]
        # the first new token needs the logits of the prompt's last token, so this token is always computed
        reusable = [min(length, len(request.prompt) - 1) for length in common]
        reusable = [length if self._engine.holds(slot, length) else 0 for slot, length in enumerate(reusable)]
        best = max(self._slots, key=lambda slot: reusable[slot.index])
        longest = reusable[best.index]
        # a slot with the longest prefix whose whole cache is reused, else the least recently used slot
        lossless = (s for s in free if reusable[s.index] == longest and common[s.index] == s.cached)
        slot = next(lossless, free[0])
        source = best if longest >= self._min_copy and reusable[slot.index] < longest else slot
        reused = reusable[source.index]
        if reused and not self._ready(request, reused) and self._ready(request, 0):
            # the program that starts the prompt anew is there, the other one is not yet
            return free[0], None, 0
        return slot, source if reused else None, reused

    def _ready(self, request: _Request, start: int) -> bool:
        """Whether a program for the chunk from `start` on is compiled."""
        stop = min(start + self._engine.max_prefill_tokens, len(request.prompt))
        return self._engine.ready(start, stop, request.params.prompt_logprobs is not None)

    def _chunk(self, slot: _Slot, room: int) -> PromptChunk | None:
        """The next chunk of a prompt, of at most `room` tokens. None if its program is not compiled yet."""
        assert slot.request is not None
        stop = min(slot.cached + room, len(slot.tokens))
        scored = slot.request.params.prompt_logprobs is not None
        ready = self._engine.ready(slot.cached, stop, scored)
        return PromptChunk(slot.index, slot.cached, stop) if ready else None

    def _chunks(self) -> list[PromptChunk]:
        """The chunks of this step: one of the first prompt whose program is compiled, then whole prompts that fit."""
        chunks: list[PromptChunk] = []
        room = self._engine.max_prefill_tokens
        for slot in self._prefilling:
            if chunks and len(slot.tokens) - slot.cached > room:
                continue
            if chunk := self._chunk(slot, room):
                chunks.append(chunk)
                room -= chunk.stop - chunk.start
        return chunks

    def _prefill(self, chunks: Sequence[PromptChunk], outputs: dict[int, RequestOutput]) -> None:
        """Compute these chunks of the prompts in prefill."""
        for chunk, result in zip(chunks, self._engine.prefill(chunks), strict=True):
            slot = self._slots[chunk.slot]
            request = slot.request
            assert request is not None
            self._counters["prefilled_tokens"] += chunk.stop - chunk.start
            slot.cached = chunk.stop
            if result.prompt:
                outputs.setdefault(request.id, RequestOutput(request.id)).prompt.extend(result.prompt)
            if chunk.stop < len(request.prompt):
                continue
            self._prefilling.remove(slot)
            if result.first is not None:
                self._record_token(slot, result.first, outputs)
            else:
                # max_tokens is 0
                outputs.setdefault(request.id, RequestOutput(request.id)).finish_reason = "length"
                self._release(slot)

    def _record_token(self, slot: _Slot, emitted: EmittedToken, outputs: dict[int, RequestOutput]) -> None:
        """Add a new token to the outputs. Finish the request, or queue its continuation, if the token is the last."""
        request = slot.request
        assert request is not None
        slot.tokens.append(emitted.token.id)
        self._counters["generated_tokens"] += 1
        got = outputs.setdefault(request.id, RequestOutput(request.id))
        got.tokens.append(emitted.token)
        if emitted.finish_reason is None:
            return
        self._release(slot)
        if emitted.finish_reason == "length" and request.rest is not None:
            continuation = dataclasses.replace(request, prompt=slot.tokens, params=request.rest, on_admit=None)
            self._queue(_window(continuation, self._engine.context))
        else:
            got.finish_reason = emitted.finish_reason

    def _release(self, slot: _Slot) -> None:
        """Free a slot. Its cache stays available to other requests."""
        self._engine.release(slot.index)
        slot.request, slot.last_used = None, next(self._clock)
        if slot in self._prefilling:
            self._prefilling.remove(slot)


def _window(request: _Request, context: int) -> _Request:
    """The part of a request that fits the context: the end of its prompt, with room for half a context of new
    tokens."""
    params = request.params
    prompt = request.prompt[-(context - min(params.max_tokens, context // 2)) :]
    now = min(params.max_tokens, context - len(prompt))
    part = dataclasses.replace(params, max_tokens=now, min_tokens=min(params.min_tokens, now))
    rest = dataclasses.replace(
        params,
        max_tokens=params.max_tokens - now,
        min_tokens=params.min_tokens - part.min_tokens,
        # the positions repeat, and the random key depends on seed and position only
        seed=(params.seed + 1) % 2**32,
    )
    return dataclasses.replace(request, prompt=prompt, params=part, rest=rest if rest.max_tokens else None)


def _common_length(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    """The length of the common prefix of `tokens` and `prompt`."""
    differs = itertools.compress(itertools.count(), map(operator.ne, tokens, prompt))
    return next(differs, min(len(tokens), len(prompt)))
