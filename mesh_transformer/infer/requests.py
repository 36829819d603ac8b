"""What is asked of an engine and what it answers. Plain Python: the scheduler and the server import no jax for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

MAX_STOP_TOKENS = 16  # a request
MAX_TOP_LOGPROBS = 20  # alternatives a token
MAX_NGRAM = 64
LEAST_TEMPERATURE = 1e-5  # a lower one is greedy
# float32 logits times or over these, and over the least temperature, stay far below its largest number
MAX_TEMPERATURE, MAX_REPETITION, MAX_BIAS = 1e6, 1e6, 1e6

Finish = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one completion is sampled.

    The steps, in order, on the float32 logits of the next token: `logit_bias` is added; the repetition penalty divides
    positive and multiplies negative logits of tokens in the prompt or the completion (Keskar et al. 2019); the
    frequency penalty times a token's count in the completion, and the presence penalty if it is there, are
    subtracted; tokens that would complete an n-gram for the second time, and end tokens before `min_tokens`, are
    left out; division by the temperature; then tokens stay that have at least `min_p` times the largest
    probability, then the `top_k` likeliest, then the smallest set of these of probability `top_p`, which is never
    empty. A temperature below LEAST_TEMPERATURE is 0.

    Raises:
        ValueError: a field is out of its range; the message names it.
    """

    max_tokens: int = 16  # 0: only the prompt is computed
    min_tokens: int = 0  # before so many, no token of stop_token_ids is drawn
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0  # 0: the likeliest token, and those that tie with it
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram: int = 0  # the n; 0: off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added)
    stop_token_ids: tuple[int, ...] = ()  # the end-of-text token too, unless it is to be ignored
    seed: int = 0  # with the prompt it decides every draw, whatever else is in the batch
    logprobs: int | None = None  # alternatives reported with each token; the token's own is always known
    prompt_logprobs: bool = False  # report the prompt's tokens too; its cache is then not reused

    def __post_init__(self) -> None:
        for name, allowed, fits in [
            ("max_tokens", "0 or more", self.max_tokens >= 0),
            ("min_tokens", f"0 to max_tokens ({self.max_tokens})", 0 <= self.min_tokens <= self.max_tokens),
            (
                "temperature",
                f"0 (greedy) or more, at most {MAX_TEMPERATURE:,.0f}",
                0 <= self.temperature <= MAX_TEMPERATURE,
            ),
            ("top_p", "0 or more, at most 1", 0 <= self.top_p <= 1),
            ("top_k", "0 (all) or more", 0 <= self.top_k < 2**31),
            ("min_p", "0 to 1", 0 <= self.min_p <= 1),
            (
                "repetition_penalty",
                f"above 0: {1 / MAX_REPETITION:f} to {MAX_REPETITION:,.0f}",
                1 / MAX_REPETITION <= self.repetition_penalty <= MAX_REPETITION,
            ),
            ("presence_penalty", "-2 to 2", -2 <= self.presence_penalty <= 2),
            ("frequency_penalty", "-2 to 2", -2 <= self.frequency_penalty <= 2),
            ("no_repeat_ngram", f"0 (off) to {MAX_NGRAM}", 0 <= self.no_repeat_ngram <= MAX_NGRAM),
            (
                "logit_bias",
                f"numbers of {-MAX_BIAS:,.0f} to {MAX_BIAS:,.0f}",
                all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias),
            ),
            ("stop_token_ids", f"at most {MAX_STOP_TOKENS}", len(self.stop_token_ids) <= MAX_STOP_TOKENS),
            ("seed", "0 to 2**32 - 1", 0 <= self.seed < 2**32),
            ("logprobs", f"none or 0 to {MAX_TOP_LOGPROBS}", 0 <= (self.logprobs or 0) <= MAX_TOP_LOGPROBS),
        ]:
            if not fits:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)}")


class Token(NamedTuple):
    """A token with its log-probability under the model's own distribution, before any of the sampling steps; nats."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, likeliest first


class Emitted(NamedTuple):
    """A new token of a slot. After one with `finish` the slot computes nothing more."""

    slot: int
    token: Token
    finish: Finish | None  # "stop": it is one of stop_token_ids; "length": max_tokens are reached


class Piece(NamedTuple):
    """Positions start .. stop - 1 of the prompt of a slot."""

    slot: int
    start: int
    stop: int


class Prefilled(NamedTuple):
    """What a piece of a prompt gave."""

    first: (
        Emitted | None
    )  # the first new token, when the piece was the prompt's last (None with max_tokens 0)
    prompt: Sequence[Token]  # of the prompt's tokens start + 1 .. stop (at most its last), if asked for


class Engine(Protocol):
    """A model with a cache of `slots` sequences of `context` positions each; what the scheduler drives.

    One thread uses it. A slot's cache stays valid after `release`, until the slot is given out again.
    """

    slots: int
    context: int
    chunk: int  # prompt tokens, in all, that one `prefill` takes at most

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        """Give a slot that is not in use to a request.

        Its first `reused` positions (fewer than the prompt has) are taken from the cache of slot `source`, which may be
        the slot itself, or be in use; `source` is None when `reused` is 0. The rest must be prefilled, in order.
        """

    def prefill(self, pieces: Sequence[Piece]) -> list[Prefilled]:
        """Compute pieces of prompts, of each slot one; when `stop` is the prompt's length, the first token is drawn."""

    def generate(self, steps: int) -> list[Emitted]:
        """Up to `steps` tokens (1 or more) for every slot whose prompt is computed and that is not finished; there is
        one. They come in order of steps."""

    def release(self, slot: int) -> None:
        """Take a slot out of use: stop computing its sequence if it is not finished. Once for each `insert`."""
