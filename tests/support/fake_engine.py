"""An engine without a model. It computes each token from the tokens in the cache, and asserts the contract of `Engine`.

A wrong position in a cache changes the tokens, so that they differ from those of `alone`, which uses no cache.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from mesh_transformer.infer.requests import (
    EmittedToken,
    FinishReason,
    PrefillResult,
    PromptChunk,
    SamplingParams,
    Token,
)


def logprobs_after(tokens: Sequence[int], vocab: int) -> list[float]:
    """Log-probabilities of the next token: a ramp whose peak depends on each previous token and its position."""
    peak = sum((i + 1) * token * 7 + i for i, token in enumerate(tokens)) % vocab
    scores = [-0.25 * ((peak - token) % vocab) for token in range(vocab)]
    total = math.log(sum(map(math.exp, scores)))
    return [score - total for score in scores]


def report(tokens: Sequence[int], token: int, vocab: int, top: int | None) -> Token:
    """A token after `tokens`, with the log-probabilities that an engine reports."""
    logprobs = logprobs_after(tokens, vocab)
    likeliest = sorted(range(vocab), key=lambda other: -logprobs[other])
    rank = 1 + likeliest.index(token)
    return Token(token, logprobs[token], tuple((other, logprobs[other]) for other in likeliest[: top or 0]), rank)


def draw(
    tokens: Sequence[int], generated: int, params: SamplingParams, vocab: int
) -> tuple[Token, FinishReason | None]:
    """The token after `tokens`, and the finish reason if it is the last one.

    It uses only the parameters max_tokens, min_tokens, stop_token_ids, allowed_token_ids, bad_words, seed and logprobs.

    Args:
        generated: how many of `tokens` belong to the completion.
    """
    logprobs = logprobs_after(tokens, vocab)
    likeliest = sorted(range(vocab), key=lambda other: -logprobs[other])
    barred = set(params.stop_token_ids) if generated < params.min_tokens else set()
    completion = tuple(tokens[len(tokens) - generated :])
    barred |= {word[-1] for word in params.bad_words if completion[generated - len(word) + 1 :] == word[:-1]}
    allowed = [token for token in likeliest if token in (params.allowed_token_ids or [token]) and token not in barred]
    token = allowed[params.seed % len(allowed)]
    finish_reason: FinishReason | None = "length" if generated + 1 == params.max_tokens else None
    if token in params.stop_token_ids:
        finish_reason = "stop"
    return report(tokens, token, vocab, params.logprobs), finish_reason


@dataclasses.dataclass
class Completion:
    """The complete result of a request."""

    tokens: list[Token]
    prompt: list[Token]
    finish_reason: FinishReason


def alone(prompt: Sequence[int], params: SamplingParams, vocab: int = 101) -> Completion:
    """The completion of a request. Each token is computed from the whole sequence."""
    sequence, tokens = list(prompt), []
    finish_reason: FinishReason | None = None if params.max_tokens else "length"
    while finish_reason is None:
        token, finish_reason = draw(sequence, len(tokens), params, vocab)
        tokens.append(token)
        sequence.append(token.id)
    known = range(1, len(prompt)) if params.prompt_logprobs is not None else ()
    scored = [report(prompt[:i], prompt[i], vocab, params.prompt_logprobs) for i in known]
    return Completion(tokens, scored, finish_reason)


@dataclasses.dataclass
class _Sequence:
    prompt: list[int]
    params: SamplingParams
    # new tokens; the last one is not in the cache
    tokens: list[int] = dataclasses.field(default_factory=list)
    finished: bool = False


class FakeEngine:
    """An `Engine` without a model, see the module's docstring.

    Args:
        slots, context, max_prefill_tokens: see `Engine`.
        vocab: tokens are 0 to vocab - 1.
        ring: a window, and the number of newest positions that the cache of a slot holds; None: it holds all.
        delay: seconds per `prefill` and per step of `generate`.
    """

    def __init__(
        self,
        *,
        slots: int = 4,
        context: int = 64,
        max_prefill_tokens: int = 8,
        vocab: int = 101,
        ring: tuple[int, int] | None = None,
        delay: float = 0.0,
    ):
        self.slots, self.context, self.max_prefill_tokens = slots, context, max_prefill_tokens
        self.vocab, self.ring, self.delay = vocab, ring, delay
        # the tokens of the valid positions of each slot
        self.caches: list[list[int]] = [[] for _ in range(slots)]
        # how many of them the caller knows: those whose tokens it read
        self.known = [0] * slots
        # the end of the positions that were written to each slot, or to the slot that it was copied from
        self.ends = [0] * slots
        self.in_use: dict[int, _Sequence] = {}
        # ("insert", slot, source, reused), ("prefill", slot, start, stop), ...
        self.calls: list[tuple] = []
        # of all calls of `generate`
        self.computed_steps = 0
        # calls of `generate`, and the number of the last one that was read
        self.started = self.read = 0

    def holds(self, slot: int, length: int) -> bool:
        if self.ring is None:
            return True
        window, size = self.ring
        needed = range(max(0, length - window + 1), length)
        return all(position >= self.ends[slot] - size for position in needed)

    def ready(self, start: int, stop: int, scored: bool) -> bool:
        assert 0 <= start < stop <= self.context
        return True

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        self.calls.append(("insert", slot, source, reused))
        assert 0 <= slot < self.slots
        assert slot not in self.in_use
        assert all(0 <= token < self.vocab for token in prompt)
        assert len(prompt) + params.max_tokens <= self.context
        assert 0 <= reused < len(prompt)
        assert (source is None) == (reused == 0)
        if source is not None:
            assert params.prompt_logprobs is None
            assert reused <= len(self.caches[source]), "a position that is not computed"
            assert self.holds(source, reused), "a position that is forgotten"
        taken = [] if source is None else self.caches[source][:reused]
        self.caches[slot], self.known[slot] = taken, reused
        self.ends[slot] = 0 if source is None else self.ends[source]
        self.in_use[slot] = _Sequence(list(prompt), params)

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[PrefillResult]:
        assert chunks
        assert len({chunk.slot for chunk in chunks}) == len(chunks)
        assert sum(chunk.stop - chunk.start for chunk in chunks) <= self.max_prefill_tokens
        time.sleep(self.delay)
        return [self._prefill(*chunk) for chunk in chunks]

    def _prefill(self, slot: int, start: int, stop: int) -> PrefillResult:
        self.calls.append(("prefill", slot, start, stop))
        sequence, cache = self.in_use[slot], self.caches[slot]
        prompt, params = sequence.prompt, sequence.params
        assert start == len(cache), "positions are computed in order, each once"
        assert start < stop <= len(prompt)
        assert not sequence.tokens
        known = []
        for i in range(start, stop):
            cache.append(prompt[i])
            if params.prompt_logprobs is not None and i + 1 < len(prompt):
                known.append(report(cache, prompt[i + 1], self.vocab, params.prompt_logprobs))
        self.ends[slot] = max(self.ends[slot], stop)
        self.known[slot] = stop
        last = stop == len(prompt)
        sequence.finished = last and params.max_tokens == 0
        return PrefillResult(self._draw(slot) if last and params.max_tokens else None, known)

    def generate(self, steps: int) -> Callable[[], list[EmittedToken]]:
        """Computes the tokens at once, as a fast device would."""
        self.calls.append(("generate", steps))
        assert steps >= 1
        emitted: list[tuple[_Sequence, EmittedToken]] = []
        first = self.started == self.read
        number = self.started = self.started + 1
        for step in range(steps):
            self.computed_steps += 1
            running = [slot for slot, s in sorted(self.in_use.items()) if s.tokens and not s.finished]
            assert step or running or not first, "there is nothing to generate"
            if running:
                time.sleep(self.delay)
            for slot in running:
                self.caches[slot].append(self.in_use[slot].tokens[-1])
                self.ends[slot] = max(self.ends[slot], len(self.caches[slot]))
                emitted.append((self.in_use[slot], self._draw(slot)))

        def read() -> list[EmittedToken]:
            self.calls.append(("read", steps))
            assert self.read < number, "results are read in the order of the calls"
            self.read = number
            tokens = [token for sequence, token in emitted if self.in_use.get(token.slot) is sequence]
            for token in tokens:
                self.known[token.slot] += 1
            return tokens

        return read

    def release(self, slot: int) -> None:
        self.calls.append(("release", slot))
        del self.in_use[slot]

    def _draw(self, slot: int) -> EmittedToken:
        sequence, cache = self.in_use[slot], self.caches[slot]
        assert len(cache) == len(sequence.prompt) + len(sequence.tokens), "a position is missing"
        token, finish_reason = draw(cache, len(sequence.tokens), sequence.params, self.vocab)
        sequence.tokens.append(token.id)
        sequence.finished = finish_reason is not None
        return EmittedToken(slot, token, finish_reason)


class RecordingEngine(FakeEngine):
    """Records the parameters of its sequences."""

    recorded: list[SamplingParams] = []  # noqa: RUF012  (cleared for each test)

    def insert(self, slot: int, prompt: Any, params: SamplingParams, **how: Any) -> None:
        self.recorded.append(params)
        super().insert(slot, prompt, params, **how)
