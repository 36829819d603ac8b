"""Which request's tokens are computed next, and in which slot. Plain Python around an `Engine`."""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
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


class QueueFull(Exception):
    """As many requests wait as may."""


@dataclasses.dataclass
class RequestOutput:
    """What a step gave one request."""

    request: int  # the id given to submit
    # new ones; the last is the stop token when `finish_reason` is "stop"
    tokens: list[Token] = dataclasses.field(default_factory=list)
    # of the prompt's second token on, with prompt_logprobs: those of this step
    prompt: list[Token] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None  # the request is over; no more outputs follow


class SchedulerStats(NamedTuple):
    """Counters since the start, and gauges."""

    running: int = 0  # requests that have a slot
    waiting: int = 0  # requests that have none
    slots: int = 0
    prompt_tokens: int = 0  # of admitted requests
    prefilled_tokens: int = 0  # computed
    reused_tokens: int = 0  # taken from an earlier request's cache
    generated_tokens: int = 0
    cached_tokens: int = 0  # positions that are valid now, over all slots
    positions: int = 0  # of all slots


@dataclasses.dataclass
class _Request:
    id: int
    prompt: list[int]
    params: SamplingParams
    on_admit: Callable[[], None] | None
    rest: SamplingParams | None = None  # of what is drawn when the context is full


@dataclasses.dataclass
class _Slot:
    index: int
    request: _Request | None = None  # None: the slot is free
    # the sequence, kept after its request is over
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0  # so many of `tokens` are in the cache
    last_used: int = 0  # when it was last released or copied from; larger is later


class Scheduler:
    """Requests through an engine: first come, first served, and no prefix computed twice that some slot still holds.

    A step computes at most `engine.max_prefill_tokens` tokens of prompts: a chunk of one prompt, and after it whole prompts for which there is
    room. A request gets its slot when its prefill begins, not before: nobody starts later for it, and requests of one
    prompt find the prefix that the first of them computed.

    One thread uses it. What the engine raises passes through `step`; the scheduler is of no use afterwards.

    Args:
        engine: what computes; nobody else may use it.
        max_queue: so many requests may wait beyond those for which a slot is free.
        max_steps: tokens of each request in a step when nobody waits; each is a delay for who comes meanwhile.
        min_copy: a prefix of fewer tokens is computed again rather than copied from another slot.
    """

    def __init__(self, engine: Engine, *, max_queue: int, max_steps: int = 8, min_copy: int = 8):
        self._engine = engine
        self._max_queue, self._max_steps, self._min_copy = max_queue, max_steps, min_copy
        self._waiting: dict[int, _Request] = {}  # in order of arrival
        self._slots = [_Slot(index) for index in range(engine.slots)]
        self._prefilling: list[_Slot] = []
        self._clock = itertools.count(1)
        self._counters: collections.Counter[str] = collections.Counter()  # of `SchedulerStats`

    def submit(
        self,
        request: int,
        prompt: Sequence[int],
        params: SamplingParams,
        on_admit: Callable[[], None] | None = None,
        *,
        slide: bool = False,
    ) -> None:
        """Queue a request; its tokens come from later steps.

        Args:
            request: an id that no waiting or running request has.
            prompt: token ids, at least one.
            on_admit: called in the step that gives the request its slot.
            slide: prompt and completion may be longer than the context. The prompt's end is taken; when the context is full, its
                last half queues as a prompt behind others, and penalties count from there. Not with `prompt_logprobs`.

        Raises:
            QueueFull: `max_queue` requests wait for a slot already.
            ValueError: the prompt is empty, or does not fit the context with `max_tokens`, or the id is taken.
        """
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if not slide and len(prompt) + params.max_tokens > self._engine.context:
            raise ValueError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}: together "
                f"{len(prompt) + params.max_tokens}, more than the context of {self._engine.context}"
            )
        if request in self._waiting or any(s.request and s.request.id == request for s in self._slots):
            raise ValueError(f"there is a request {request} already")
        if len(self._waiting) >= self._max_queue + len(self._free()):
            raise QueueFull(f"{self._max_queue} requests wait already")
        whole = _Request(request, list(prompt), params, on_admit)
        self._waiting[request] = _window(whole, self._engine.context) if slide else whole

    def cancel(self, request: int) -> None:
        """Forget a waiting or running request: no more outputs, and its slot is free. Other ids are ignored."""
        self._waiting.pop(request, None)
        for slot in self._slots:
            if slot.request is not None and slot.request.id == request:
                self._release(slot)

    def step(self) -> list[RequestOutput]:
        """One unit of work: chunks of prompts and a token of each running request, or several tokens of each.

        Returns:
            one RequestOutput for each request that the step gave something, none when idle.
        """
        outputs: dict[int, RequestOutput] = {}
        while self._admit():
            pass
        steps = 1 if self._prefilling or self._waiting else self._max_steps
        if self._prefilling:
            self._prefill(outputs)
        left = [
            slot.request.params.max_tokens - (len(slot.tokens) - len(slot.request.prompt))
            for slot in self._slots
            if slot.request is not None and slot not in self._prefilling
        ]
        if left:
            for emitted in self._engine.generate(min(steps, max(left))):
                slot = self._slots[emitted.slot]
                slot.cached += 1  # the token before went in, to give this one
                self._record_token(slot, emitted, outputs)
        return list(outputs.values())

    def run(self) -> Iterator[RequestOutput]:
        """What every step gives until nothing waits or runs."""
        while not self.idle:
            outputs = self.step()
            liveness.record_progress()  # the step may have been on a device alone
            yield from outputs

    @property
    def idle(self) -> bool:
        """No request waits or runs."""
        return not self._waiting and len(self._free()) == len(self._slots)

    @property
    def stats(self) -> SchedulerStats:
        """Counters and gauges as of now."""
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
        """Give the request that has waited longest a slot, if one is free and this step has room for its prompt."""
        if not self._waiting or not self._free():
            return False
        request = next(iter(self._waiting.values()))
        slot, source, reused = self._choose_slot(request)
        if self._prefilling and not self._fits(request, reused):
            return False
        del self._waiting[request.id]
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

    def _fits(self, request: _Request, reused: int) -> bool:
        """Whether a prompt can be computed beside those that are: whole, and none of them holds more of its prefix."""
        begun = [slot.request.prompt for slot in self._prefilling if slot.request is not None]
        left = sum(len(slot.tokens) - slot.cached for slot in self._prefilling)
        if left + len(request.prompt) - reused > self._engine.max_prefill_tokens:
            return False
        longest = max(
            min(_common_length(prompt, request.prompt), len(request.prompt) - 1) for prompt in begun
        )
        return request.params.prompt_logprobs or longest < max(self._min_copy, reused + 1)

    def _choose_slot(self, request: _Request) -> tuple[_Slot, _Slot | None, int]:
        """A free slot for a request, the slot that holds a prefix of its prompt, and the prefix's length."""
        free = sorted(self._free(), key=lambda slot: slot.last_used)
        if request.params.prompt_logprobs:  # they come from computing the prompt
            return free[0], None, 0
        common = [min(_common_length(slot.tokens, request.prompt), slot.cached) for slot in self._slots]
        # the prompt's last token gives the first new one: it must be computed
        reusable = [min(length, len(request.prompt) - 1) for length in common]
        best = max(self._slots, key=lambda slot: reusable[slot.index])
        longest = reusable[best.index]
        # a slot as good as any that loses nothing, else the one unused for longest
        lossless = (s for s in free if reusable[s.index] == longest and common[s.index] == s.cached)
        slot = next(lossless, free[0])
        source = best if longest >= self._min_copy and reusable[slot.index] < longest else slot
        reused = reusable[source.index]
        return slot, source if reused else None, reused

    def _prefill(self, outputs: dict[int, RequestOutput]) -> None:
        """Compute the next chunks of the prompts that are begun."""
        slots, room = self._prefilling, self._engine.max_prefill_tokens
        chunks = []
        for slot in slots:
            stop = min(slot.cached + room, len(slot.tokens))
            chunks.append(PromptChunk(slot.index, slot.cached, stop))
            room -= stop - slot.cached
        self._prefilling = []
        for slot, chunk, found in zip(slots, chunks, self._engine.prefill(chunks), strict=True):
            request = slot.request
            assert request is not None
            self._counters["prefilled_tokens"] += chunk.stop - chunk.start
            slot.cached = chunk.stop
            if found.prompt:
                outputs.setdefault(request.id, RequestOutput(request.id)).prompt.extend(found.prompt)
            if chunk.stop < len(request.prompt):
                self._prefilling.append(slot)
            elif found.first is not None:
                self._record_token(slot, found.first, outputs)
            else:  # max_tokens is 0
                outputs.setdefault(request.id, RequestOutput(request.id)).finish_reason = "length"
                self._release(slot)

    def _record_token(self, slot: _Slot, emitted: EmittedToken, outputs: dict[int, RequestOutput]) -> None:
        """Note a new token, and that the request is over if it is the last."""
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
            whole = dataclasses.replace(request, prompt=slot.tokens, params=request.rest, on_admit=None)
            self._waiting[request.id] = _window(whole, self._engine.context)
        else:
            got.finish_reason = emitted.finish_reason

    def _release(self, slot: _Slot) -> None:
        """Make a slot free; what its cache holds may serve others."""
        self._engine.release(slot.index)
        slot.request, slot.last_used = None, next(self._clock)
        if slot in self._prefilling:
            self._prefilling.remove(slot)


def _window(whole: _Request, context: int) -> _Request:
    """The part of a request that one context takes: the end of its prompt, with room for half a context of new tokens."""
    params = whole.params
    prompt = whole.prompt[-(context - min(params.max_tokens, context // 2)) :]
    now = min(params.max_tokens, context - len(prompt))
    part = dataclasses.replace(params, max_tokens=now, min_tokens=min(params.min_tokens, now))
    rest = dataclasses.replace(
        params,
        max_tokens=params.max_tokens - now,
        min_tokens=params.min_tokens - part.min_tokens,
        # positions come again, and a draw depends on seed and position
        seed=(params.seed + 1) % 2**32,
    )
    return dataclasses.replace(whole, prompt=prompt, params=part, rest=rest if rest.max_tokens else None)


def _common_length(tokens: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens a prompt has in common with others, from the first on."""
    differs = itertools.compress(itertools.count(), map(operator.ne, tokens, prompt))
    return next(differs, min(len(tokens), len(prompt)))
