"""The interface of an engine: sampling parameters, prompt chunks, tokens. No jax: the scheduler and the server import
it."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

# per request
MAX_STOP_TOKENS = 16
# alternatives per token
MAX_TOP_LOGPROBS = 20
# sequences of tokens that a request excludes, and tokens of each
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 256, 16
MAX_NGRAM = 64
# sampling with a lower temperature is greedy
LEAST_TEMPERATURE = 1e-5
# with these limits, scaled logits stay finite in float32
MAX_TEMPERATURE, MAX_REPETITION, MAX_BIAS = 1e6, 1e6, 1e6

FinishReason = Literal["stop", "length"]


class Option(NamedTuple):
    """A row of the table of sampling options.

    Args:
        default: the default value.
        within: the smallest and the largest allowed value.
        allowed: the allowed values in words, for error messages.
        help: the help text of the option in device_sample.py.
        off: the value that disables the option. Nothing is computed for it then.
    """

    default: float
    within: tuple[float, float]
    allowed: str
    help: str
    off: float

    @property
    def dtype(self) -> str:
        """The dtype of the option's vector on the device: int32 if `default` is an int, else float32."""
        return "int32" if isinstance(self.default, int) else "float32"


def _row(default: Any, within: tuple[float, float], allowed: str, *, help: str, off: float | None = None) -> Any:
    off = default if off is None else off
    option = Option(default=default, within=within, allowed=allowed, help=help, off=off)
    return dataclasses.field(default=default, metadata={"option": option})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The sampling options. Each field defines one row of the table OPTIONS.

    A new option needs a field here and its arithmetic in `sampling.py`. The field's name is also the name in
    POST /v1/completions and, with dashes, the option of device_sample.py.

    Raises:
        ValueError: a field is out of its range. The message starts with the name of the field.
    """

    temperature: float = _row(
        1.0, (0, MAX_TEMPERATURE), f"0 (greedy) or more, at most {MAX_TEMPERATURE:,.0f}",
        help="0 always chooses the most likely token (default: %(default)s)", off=0.0,
    )  # fmt: skip
    top_p: float = _row(
        1.0, (0, 1), "0 or more, at most 1",
        help="sample from the most likely tokens whose probabilities sum to this (default: %(default)s, all)",
    )  # fmt: skip
    top_k: int = _row(
        0, (0, 2**31 - 1), "0 (all) or more",
        help="sample from this number of most likely tokens (default: 0, all)",
    )  # fmt: skip
    min_p: float = _row(
        0.0, (0, 1), "0 to 1",
        help="sample from tokens with at least this fraction of the largest probability (default: 0, all)",
    )  # fmt: skip
    repetition_penalty: float = _row(
        1.0, (1 / MAX_REPETITION, MAX_REPETITION), f"above 0: {1 / MAX_REPETITION:f} to {MAX_REPETITION:,.0f}",
        help="divide positive logits, and multiply negative logits, of tokens in the prompt or the completion by this; "
        "above 1 makes them less likely (default: 1, off)",
    )  # fmt: skip
    presence_penalty: float = _row(
        0.0, (-2, 2), "-2 to 2",
        help="subtract this from the logit of each token that is in the completion; -2 to 2 (default: 0)",
    )  # fmt: skip
    frequency_penalty: float = _row(
        0.0, (-2, 2), "-2 to 2",
        help="subtract this from a token's logit for each occurrence in the completion; -2 to 2 (default: 0)",
    )  # fmt: skip
    no_repeat_ngram_size: int = _row(
        0, (0, MAX_NGRAM), f"0 (off) to {MAX_NGRAM}",
        help=f"never repeat an n-gram of this many tokens; 0 to {MAX_NGRAM} (default: 0, off)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._check(
            (name, option.allowed, option.within[0] <= getattr(self, name) <= option.within[1])
            for name, option in OPTIONS.items()
        )

    def _check(self, fields: Iterable[tuple[str, str, bool]]) -> None:
        """Raise ValueError for the first field that is out of range, given (name, allowed values, whether it fits)."""
        for name, allowed, fits in fields:
            if not fits:
                raise ValueError(f"{name} must be {allowed}; got {getattr(self, name)}")

    @property
    def options(self) -> dict[str, Any]:
        """The value of each row of OPTIONS, by name."""
        return {name: getattr(self, name) for name in OPTIONS}


def all_if_negative(top_k: float) -> float:
    """`top_k` with vLLM's value for all tokens, -1, as 0."""
    return 0 if top_k == -1 else top_k


OPTIONS: dict[str, Option] = {field.name: field.metadata["option"] for field in dataclasses.fields(SamplingOptions)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams(SamplingOptions):
    """The parameters of one completion.

    Sampling applies these steps, in this order, to the float32 logits of the next token:

    1. Add `logit_bias`. Exclude the tokens that are not in `allowed_token_ids`.
    2. Repetition penalty: for tokens in the prompt or the completion, divide positive logits and multiply negative
        logits
       (Keskar et al. 2019).
    3. For tokens in the completion, subtract the frequency penalty times their count, then the presence penalty.
    4. Exclude tokens that would repeat an n-gram, and tokens that would complete one of `bad_words` in the completion.
       Exclude stop tokens while there are fewer than `min_tokens` tokens.
    5. Divide by the temperature.
    6. Keep the tokens with at least `min_p` times the largest probability, then the `top_k` most likely of these, then
       the smallest set of these with probability `top_p`. At least one token is kept.

    A temperature below LEAST_TEMPERATURE counts as 0: the token with the largest logit after step 4 is chosen.

    Args:
        max_tokens: the largest number of new tokens. With 0, only the prompt is computed.
        min_tokens: while there are fewer new tokens, no token of `stop_token_ids` is sampled.
        logit_bias: pairs of a token and the number to add to its logit.
        allowed_token_ids: only these tokens are sampled. Empty: all.
        bad_words: sequences of tokens that the completion does not contain.
        stop_token_ids: tokens that end the completion. The end-of-text token is one of them, unless the request ignores
            it.
        seed: it determines the samples, together with the prompt. Other requests of the batch have no influence.
        logprobs: how many alternatives to report with each token. The token's own log-probability is always reported.
        prompt_logprobs: how many alternatives to report with each token of the prompt. None: report nothing of the
            prompt. A prompt that is reported reuses no cached prefix.

    Raises:
        ValueError: as in `SamplingOptions`.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        biases_fit = all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias)
        # of the allowed tokens, those that step 4 may exclude
        barred = {word[-1] for word in self.bad_words if word}
        barred |= set(self.stop_token_ids if self.min_tokens else ())
        some_allowed = not self.allowed_token_ids or not barred.issuperset(self.allowed_token_ids)
        repeats = not (self.allowed_token_ids and self.no_repeat_ngram_size)
        bad_words_fit = len(self.bad_words) <= MAX_BAD_WORDS and all(
            0 < len(word) <= MAX_BAD_WORD_TOKENS for word in self.bad_words
        )
        self._check(
            [
                ("max_tokens", "0 or more", self.max_tokens >= 0),
                ("min_tokens", f"0 to max_tokens ({self.max_tokens})", 0 <= self.min_tokens <= self.max_tokens),
                ("logit_bias", f"numbers of {-MAX_BIAS:,.0f} to {MAX_BIAS:,.0f}", biases_fit),
                ("stop_token_ids", f"at most {MAX_STOP_TOKENS}", len(self.stop_token_ids) <= MAX_STOP_TOKENS),
                ("allowed_token_ids", "tokens that bad_words and min_tokens cannot all exclude", some_allowed),
                ("no_repeat_ngram_size", "0 beside allowed_token_ids, because it could exclude all of them", repeats),
                ("bad_words", f"at most {MAX_BAD_WORDS} of 1 to {MAX_BAD_WORD_TOKENS} tokens", bad_words_fit),
                ("seed", "0 to 2**32 - 1", 0 <= self.seed < 2**32),
                *((name, f"none or 0 to {MAX_TOP_LOGPROBS}", 0 <= (getattr(self, name) or 0) <= MAX_TOP_LOGPROBS)
                  for name in ("logprobs", "prompt_logprobs")),
            ]
        )  # fmt: skip
        super().__post_init__()

    @property
    def most_logprobs(self) -> int:
        """The largest number of alternatives that a token has, of the prompt or new."""
        return max(self.logprobs or 0, self.prompt_logprobs or 0)


class Token(NamedTuple):
    """A token, its log-probability in nats under the model's distribution before all sampling steps, and alternatives.

    Args:
        top: the most likely tokens and their log-probabilities, the most likely first.
        rank: how many tokens are at least as likely, itself included. 0: not computed, as for new tokens.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class EmittedToken(NamedTuple):
    """A new token of a slot.

    Args:
        finish_reason: "stop" if the token is one of stop_token_ids, "length" if it is the last of max_tokens. None if
            the slot continues.
    """

    slot: int
    token: Token
    finish_reason: FinishReason | None


class PromptChunk(NamedTuple):
    """A part of the prompt of a slot: positions start to stop - 1."""

    slot: int
    start: int
    stop: int


class PrefillResult(NamedTuple):
    """The result of a prompt chunk.

    Args:
        first: the first new token, if the chunk is the last one of its prompt and max_tokens is not 0.
        prompt: the prompt's tokens start + 1 to stop, up to its last one, if the request has `prompt_logprobs`.
    """

    first: EmittedToken | None
    prompt: Sequence[Token]


class Engine(Protocol):
    """A model with a cache of `slots` sequences of `context` positions each. The scheduler calls it.

    Only one thread may use it. The cache of a slot stays valid after `release`, until the next `insert` into the slot.
    Layers with a window may forget early positions: `holds` says whether a prefix can still be reused.

    Args:
        max_prefill_tokens: the largest number of prompt tokens in one call of `prefill`, over all chunks.
    """

    slots: int
    context: int
    max_prefill_tokens: int

    def holds(self, slot: int, length: int) -> bool:
        """Whether a request can continue after the first `length` of a slot's cached positions."""

    def ready(self, start: int, stop: int, scored: bool) -> bool:
        """Whether a program for a prompt chunk of these positions is compiled, `scored` for one whose request has
        `prompt_logprobs`. If it is not, it is compiled next."""

    def insert(
        self, slot: int, prompt: Sequence[int], params: SamplingParams, *, source: int | None, reused: int
    ) -> None:
        """Assign a free slot to a request. The positions of the prompt that are not reused must be prefilled next, in
        order.

        Args:
            source: the slot whose cache `holds` the first `reused` positions: this one, or another one, free or in
                use. None if `reused` is 0.
            reused: positions to take from the cache of `source`: fewer than the prompt has.
        """

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[PrefillResult]:
        """Compute at most one prompt chunk per slot, each of them `ready`. The last chunk of a prompt also samples the
        first new token."""

    def generate(self, steps: int) -> Callable[[], list[EmittedToken]] | None:
        """Start to generate up to `steps` tokens, at least 1, for each slot with a computed prompt that is not
        finished.

        Returns:
            A function that waits for the tokens and returns them, in order of steps, without those of slots that were
            released meanwhile. Other methods may be called before it, `generate` too: the results of several calls are
            read in the order of the calls. None: no program for these slots is compiled yet.
        """

    def release(self, slot: int) -> None:
        """Free a slot and stop its sequence if it is not finished. Call it once for each `insert`."""
