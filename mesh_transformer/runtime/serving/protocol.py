"""The JSON of requests and responses: OpenAI's completions with vLLM's extensions, and the original program's
/complete.

Unknown fields are ignored, as by OpenAI and vLLM, but the fields of `fields.REFUSED` are errors. A null is the same as
an absent field. Functions here check lists and objects, because pydantic would record an error for each of a million
wrong elements.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, create_model, model_validator
from pydantic.json_schema import SkipJsonSchema

from mesh_transformer.config.describe import short
from mesh_transformer.infer.requests import MAX_BAD_WORDS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS, OPTIONS
from mesh_transformer.runtime.serving.fields import REFUSED, Refusals

# prompts x n of a request
MAX_SEQUENCES = 128
MAX_STOPS, MAX_STOP_CHARS = 1000, 1000
MAX_LOGIT_BIAS, MAX_BIAS = 1024, 100.0
# each is excluded with a space before it too
MAX_WORDS = MAX_BAD_WORDS // 2
INT64 = 2**63
# of a place in a body, for messages
_SHOWN_CHARS = 100
# the prompt of a request without one; it becomes the end-of-text token
END_OF_TEXT: list[str | list[int]] = [""]
Count = Annotated[int, Field(lt=2**31)]
_KINDS: dict[type, Any] = {int: Count, float: float}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_tokens(value: Any) -> bool:
    """Whether a value is a list of whole numbers."""
    return isinstance(value, list) and all(map(_whole, value))


def _prompts(value: Any) -> list[str | list[int]]:
    """A list of prompts, from a text, a list of texts, a list of token IDs or a list of such lists."""
    prompts = [value] if isinstance(value, str) or (value and is_tokens(value)) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("must be a text, a list of texts, a list of token IDs, or a list of such lists")
    if len(prompts) > MAX_SEQUENCES:
        raise ValueError(f"has {len(prompts)} prompts; at most {MAX_SEQUENCES} are allowed")
    if not (all(isinstance(p, str) for p in prompts) or all(p and is_tokens(p) for p in prompts)):
        raise ValueError("must contain only texts, or only lists of token IDs, none of them empty")
    return prompts


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _stop_tokens(value: Any) -> tuple[int, ...]:
    if not is_tokens(value):
        raise ValueError("must be a list of token IDs")
    # the end-of-text token is one of MAX_STOP_TOKENS
    if len(value) >= MAX_STOP_TOKENS:
        raise ValueError(f"has {len(value)} token IDs; at most {MAX_STOP_TOKENS - 1} are allowed")
    return tuple(value)


def _allowed_tokens(value: Any) -> tuple[int, ...]:
    if not is_tokens(value):
        raise ValueError("must be a list of token IDs")
    return tuple(dict.fromkeys(value))


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError("must be a list of texts")
    if len(value) > MAX_WORDS or not all(word.strip() and len(word) <= MAX_STOP_CHARS for word in value):
        raise ValueError(f"must be at most {MAX_WORDS} texts of 1 to {MAX_STOP_CHARS} characters, none of them blank")
    return tuple(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError('must be an object from token IDs to numbers, such as {"50256": -100}')
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"has the key {short(token)}, which is not a token ID")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"must contain numbers from {-MAX_BIAS:g} to {MAX_BIAS:g}; token {token} has {short(bias)}"
            )
        biases[int(token)] = float(bias)
    return tuple(biases.items())


def _as_whole(value: Any) -> Any:
    """Convert 8.0 and "8" to 8. Other values do not change."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # no allowed value has more than ten digits
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        return int(value)
    return value


# OpenAI accepts a whole number in these other forms too, and clients send them
TokenCount = Annotated[Count, BeforeValidator(_as_whole, Count | Annotated[str, Field(pattern="^[0-9]{1,9}$")])]
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Prompts = Annotated[
    Any,
    PlainValidator(
        _prompts,
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_SEQUENCES)]
        | Tokens
        | Annotated[list[Tokens], Field(min_length=1, max_length=MAX_SEQUENCES)],
    ),
]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[Any, PlainValidator(_stops, Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)])]
StopTokens = Annotated[Any, PlainValidator(_stop_tokens, Annotated[list[int], Field(max_length=MAX_STOP_TOKENS - 1)])]
AllowedTokens = Annotated[Any, PlainValidator(_allowed_tokens, list[int])]
Words = Annotated[Any, PlainValidator(_words, Annotated[list[Stop], Field(max_length=MAX_WORDS)])]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[Any, PlainValidator(_logit_bias, Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)])]
Samples = Annotated[int, Field(ge=1, le=MAX_SEQUENCES)]


def fault_line(fault: Mapping[str, Any], place: Sequence[int | str]) -> str:
    """A line for an error of a body's validation, at this place of the body."""
    where = ".".join(str(part)[:_SHOWN_CHARS] for part in place)
    if fault["type"] == "missing":
        return f"{where} is missing"
    reason = str(fault["msg"])
    # raised by our validators
    if fault["type"] == "value_error":
        return f"{where} {reason.removeprefix('Value error, ')}"
    return f"{where}: {reason[:1].lower()}{reason[1:]}; got {short(fault['input'])}"


class Body(BaseModel, strict=True, extra="ignore", frozen=True):
    """The body of a request."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


def refused_fields(refused: Refusals) -> Any:
    """Fields for `create_model` that take any value, so that `generation.check` can refuse it."""
    return dict.fromkeys(refused, (Annotated[Any, SkipJsonSchema()], None))


class StreamOptions(Body):
    """Additional contents of a stream."""

    include_usage: bool = False
    # as in vLLM: every event has the usage so far
    continuous_usage_stats: bool = False


_SAMPLING: Any = {name: (_KINDS[type(option.default)], option.default) for name, option in OPTIONS.items()}
_Sampled = create_model("_Sampled", __base__=Body, **_SAMPLING, **refused_fields(REFUSED))


class SampledRequest(_Sampled):
    """The fields of every request that generates text. `SamplingParams` checks the ranges of the sampling options."""

    refused: ClassVar[Refusals] = REFUSED

    model: str | None = None
    min_tokens: Count = 0
    logit_bias: LogitBias = ()
    # sample i has the seed (seed + i) mod 2**32
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Stops = ()
    stop_token_ids: StopTokens = ()
    ignore_eos: bool = False
    # an empty list allows all tokens
    allowed_token_ids: AllowedTokens = ()
    bad_words: Words = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # alternatives per token of the prompt
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    n: Samples = 1
    stream: bool = False
    stream_options: StreamOptions | None = None


class CompletionRequest(SampledRequest):
    """POST /v1/completions."""

    prompt: Prompts = END_OF_TEXT
    max_tokens: TokenCount = 16
    best_of: Samples | None = None
    logprobs: Count | None = None
    echo: bool = False
    suffix: str | None = None
    add_special_tokens: bool = True


class ClassicRequest(Body):
    """POST /complete, as in the original program. `top_p`, `temp` and `length` may be strings."""

    context: str
    top_p: Annotated[float, Field(strict=False)]
    temp: Annotated[float, Field(strict=False)]
    # number of new tokens
    length: TokenCount = 256
    top_k: Count = 0
    stop: Stops = ()


class ErrorDetail(BaseModel):
    """The cause of an error response."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response with an error status."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 415, 500, 503, 504)
}


class Logprobs(BaseModel):
    """The log-probabilities of a choice's tokens in nats, including echoed tokens, before all sampling steps."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(BaseModel):
    """A token at a place of the prompt: its log-probability in nats, how many tokens are at least as likely, and its
    text."""

    logprob: float
    rank: int
    decoded_token: str


# for each token of the prompt, the token and the most likely ones by their IDs; null for the first token
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class Choice(BaseModel):
    """One completion. The last fields are there if the request asks for them."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Usage(BaseModel):
    """The token counts of a request. A prompt counts once for its n samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """The response of POST /v1/completions. The events of a stream have the same form."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ClassicResponse(BaseModel):
    """The response of POST /complete."""

    completion: str
