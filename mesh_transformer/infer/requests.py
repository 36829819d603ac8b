"""What is asked of an engine and what it answers. Plain Python: the scheduler and the server import no jax for it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

MAX_STOP_TOKENS = 16  # a request
MAX_TOP_LOGPROBS = 20  # alternatives a token
MAX_NGRAM = 64
LEAST_TEMPERATURE = 1e-5  # a lower one is greedy
# float32 logits times or over these, and over the least temperature, stay far below its largest number
MAX_TEMPERATURE, MAX_REPETITION, MAX_BIAS = 1e6, 1e6, 1e6

FinishReason = Literal["stop", "length"]


class Option(NamedTuple):
    """A row of the table of sampling options. Vectors on the device hold int32 where `default` is an int, else float32."""

    default: float
    within: tuple[float, float]  # least and greatest value
    allowed: str  # these in words
    help: str  # of device_sample.py's option
    off: float  # with this value nothing is computed for the option

    @property
    def dtype(self) -> str:
        """Of the option's vector on the device."""
        return "int32" if isinstance(self.default, int) else "float32"


def _row(
    default: Any, within: tuple[float, float], allowed: str, *, help: str, off: float | None = None
) -> Any:
    off = default if off is None else off
    option = Option(default=default, within=within, allowed=allowed, help=help, off=off)
    return dataclasses.field(default=default, metadata={"option": option})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The table of sampling options, a field each: OPTIONS has their rows by name.

    A new option is a field here and its arithmetic in `sampling.py`. Its name is that in POST /v1/completions and, with
    dashes, that of device_sample.py's option.

    Raises:
        ValueError: a field is out of its range; the message begins with its name.
    """

    temperature: float = _row(
        1.0, (0, MAX_TEMPERATURE), f"0 (greedy) or more, at most {MAX_TEMPERATURE:,.0f}",
        help="0: always the likeliest token (default: %(default)s)", off=0.0,
    )  # fmt: skip
    top_p: float = _row(
        1.0, (0, 1), "0 or more, at most 1",
        help="sample from the likeliest tokens whose probabilities sum to this (default: %(default)s, all)",
    )  # fmt: skip
    top_k: int = _row(
        0, (0, 2**31 - 1), "0 (all) or more",
        help="sample from so many of the likeliest tokens (default: 0, all)",
    )  # fmt: skip
    min_p: float = _row(
        0.0, (0, 1), "0 to 1",
        help="sample from the tokens that have at least this times the largest probability (default: 0, all)",
    )  # fmt: skip
    repetition_penalty: float = _row(
        1.0, (1 / MAX_REPETITION, MAX_REPETITION), f"above 0: {1 / MAX_REPETITION:f} to {MAX_REPETITION:,.0f}",
        help="over 1: make tokens of the prompt and the completion less likely, by dividing positive and multiplying "
        "negative logits (default: 1, off)",
    )  # fmt: skip
    presence_penalty: float = _row(
        0.0, (-2, 2), "-2 to 2",
        help="subtract this from the logits of each token in the completion; -2 to 2 (default: 0)",
    )  # fmt: skip
    frequency_penalty: float = _row(
        0.0, (-2, 2), "-2 to 2",
        help="subtract this from the logits for each time that a token is in the completion; -2 to 2 (default: 0)",
    )  # fmt: skip
    no_repeat_ngram_size: int = _row(
        0, (0, MAX_NGRAM), f"0 (off) to {MAX_NGRAM}",
        help=f"draw no token that completes an n-gram of so many tokens again; 0 to {MAX_NGRAM} (default: 0, off)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._check(
            (name, option.allowed, option.within[0] <= getattr(self, name) <= option.within[1])
            for name, option in OPTIONS.items()
        )

    def _check(self, fields: Iterable[tuple[str, str, bool]]) -> None:
        """Raise ValueError for the first of (name, allowed values, whether it fits) that does not fit."""
        for name, allowed, fits in fields:
            if not fits:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)}")

    @property
    def options(self) -> dict[str, Any]:
        """The value of each row of OPTIONS, by name."""
        return {name: getattr(self, name) for name in OPTIONS}


OPTIONS: dict[str, Option] = {
    field.name: field.metadata["option"] for field in dataclasses.fields(SamplingOptions)
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(SamplingOptions):
    """How one completion is sampled.

    The steps, in order, on the float32 logits of the next token: `logit_bias` is added; the repetition penalty divides
    positive and multiplies negative logits of tokens in the prompt or the completion (Keskar et al. 2019); the
    frequency penalty times a token's count in the completion, and the presence penalty if it is there, are
    subtracted; tokens that would complete an n-gram for the second time, and end tokens before `min_tokens`, are
    left out; division by the temperature; then tokens stay that have at least `min_p` times the largest
    probability, then the `top_k` likeliest, then the smallest set of these of probability `top_p`, which is never
    empty. A temperature below LEAST_TEMPERATURE is 0.

    Raises:
        ValueError: as in `SamplingOptions`.
    """

    max_tokens: int = 16  # 0: only the prompt is computed
    min_tokens: int = 0  # before so many, no token of stop_token_ids is drawn
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, what is added)
    stop_token_ids: tuple[int, ...] = ()  # the end-of-text token too, unless it is to be ignored
    seed: int = 0  # with the prompt it decides every draw, whatever else is in the batch
    logprobs: int | None = None  # alternatives reported with each token; the token's own is always known
    prompt_logprobs: bool = False  # report the prompt's tokens too; its cache is then not reused

    def __post_init__(self) -> None:
        biases_fit = all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias)
        self._check(
            [
                ("max_tokens", "0 or more", self.max_tokens >= 0),
                ("min_tokens", f"0 to max_tokens ({self.max_tokens})", 0 <= self.min_tokens <= self.max_tokens),
                ("logit_bias", f"numbers of {-MAX_BIAS:,.0f} to {MAX_BIAS:,.0f}", biases_fit),
                ("stop_token_ids", f"at most {MAX_STOP_TOKENS}", len(self.stop_token_ids) <= MAX_STOP_TOKENS),
                ("seed", "0 to 2**32 - 1", 0 <= self.seed < 2**32),
                ("logprobs", f"none or 0 to {MAX_TOP_LOGPROBS}", 0 <= (self.logprobs or 0) <= MAX_TOP_LOGPROBS),
            ]
        )  # fmt: skip
        super().__post_init__()


class Token(NamedTuple):
    """A token with its log-probability under the model's own distribution, before any of the sampling steps; nats."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens and theirs, likeliest first


class EmittedToken(NamedTuple):
    """A new token of a slot. After one with `finish_reason` the slot computes nothing more."""

    slot: int
    token: Token
    finish_reason: (
        FinishReason | None
    )  # "stop": it is one of stop_token_ids; "length": max_tokens are reached


class PromptChunk(NamedTuple):
    """Positions start .. stop - 1 of the prompt of a slot."""

    slot: int
    start: int
    stop: int


class PrefillResult(NamedTuple):
    """What a chunk of a prompt gave."""

    # the first new token, when the chunk was the prompt's last (None with max_tokens 0)
    first: EmittedToken | None
    prompt: Sequence[Token]  # of the prompt's tokens start + 1 .. stop (at most its last), if asked for


class Engine(Protocol):
    """A model with a cache of `slots` sequences of `context` positions each; what the scheduler drives.

    One thread uses it. A slot's cache stays valid after `release`, until the slot is given out again.
    """

    slots: int
    context: int
    max_prefill_tokens: int  # prompt tokens, in all, that one `prefill` takes at most

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        """Give a slot that is not in use to a request.

        Its first `reused` positions (fewer than the prompt has) are taken from the cache of slot `source`, which may be
        the slot itself, or be in use; `source` is None when `reused` is 0. The rest must be prefilled, in order.
        """

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[PrefillResult]:
        """Compute chunks of prompts, of each slot one; when `stop` is the prompt's length, the first token is drawn."""

    def generate(self, steps: int) -> list[EmittedToken]:
        """Up to `steps` tokens (1 or more) for every slot whose prompt is computed and that is not finished; there is
        one. They come in order of steps."""

    def release(self, slot: int) -> None:
        """Take a slot out of use: stop computing its sequence if it is not finished. Once for each `insert`."""
