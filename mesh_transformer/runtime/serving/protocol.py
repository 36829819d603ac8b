"""The JSON that clients send and get: OpenAI's completions with vLLM's additions, and the original's /complete.

Fields that are not listed are ignored, as OpenAI and vLLM do; null is the same as absent. Lists and objects are
checked by hand, not by pydantic, which would note a fault for each of a million wrong elements.
"""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, create_model, model_validator

from mesh_transformer.config.describe import short
from mesh_transformer.infer.requests import MAX_STOP_TOKENS, OPTIONS

MAX_SEQUENCES = 128  # prompts x n of a request
MAX_STOPS, MAX_STOP_CHARS = 1000, 1000
MAX_LOGIT_BIAS, MAX_BIAS = 1024, 100.0
INT64 = 2**63
END_OF_TEXT: list[str | list[int]] = [""]  # the prompt that stands for none: the end-of-text token
Count = Annotated[int, Field(lt=2**31)]
_KINDS: dict[type, Any] = {int: Count, float: float}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(map(_whole, value))


def _prompts(value: Any) -> list[str | list[int]]:
    """A text, a list of texts, token ids or a list of lists of them, as a list of prompts."""
    prompts = [value] if isinstance(value, str) or (value and _is_tokens(value)) else value
    if not isinstance(prompts, list) or not prompts:
        raise ValueError("must be a text, a list of texts, a list of token ids, or a list of such lists")
    if len(prompts) > MAX_SEQUENCES:
        raise ValueError(f"has {len(prompts)} prompts; at most {MAX_SEQUENCES} are taken")
    if not (all(isinstance(p, str) for p in prompts) or all(p and _is_tokens(p) for p in prompts)):
        raise ValueError("must hold only texts, or only lists of token ids, none of them empty")
    return prompts


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters")
    return tuple(stops)


def _stop_tokens(value: Any) -> tuple[int, ...]:
    if not _is_tokens(value):
        raise ValueError("must be a list of token ids")
    if len(value) >= MAX_STOP_TOKENS:  # the end of a text is one of them
        raise ValueError(f"has {len(value)} token ids; at most {MAX_STOP_TOKENS - 1} are taken")
    return tuple(value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise ValueError('must be an object of token id to number, such as {"50256": -100}')
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"has {len(value)} entries; at most {MAX_LOGIT_BIAS} are taken")
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ValueError(f"has the key {short(token)}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(
                f"must hold numbers of {-MAX_BIAS:g} to {MAX_BIAS:g}; token {token} has {short(bias)}"
            )
        biases[int(token)] = float(bias)
    return tuple(biases.items())


def _as_whole(value: Any) -> Any:
    """8.0 and "8" as the whole number that they are; anything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    # ten digits are more than any count has
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        return int(value)
    return value


# OpenAI takes a whole number in any of JSON's spellings here, and clients send them
TokenCount = Annotated[
    Count, BeforeValidator(_as_whole, Count | Annotated[str, Field(pattern="^[0-9]{1,9}$")])
]
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
StopTokens = Annotated[
    Any, PlainValidator(_stop_tokens, Annotated[list[int], Field(max_length=MAX_STOP_TOKENS - 1)])
]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
LogitBias = Annotated[
    Any, PlainValidator(_logit_bias, Annotated[dict[str, Bias], Field(max_length=MAX_LOGIT_BIAS)])
]
Samples = Annotated[int, Field(ge=1, le=MAX_SEQUENCES)]


class _Body(BaseModel, strict=True, extra="ignore", frozen=True):
    """A request's body."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}


class StreamOptions(_Body):
    """What a stream holds besides its text."""

    include_usage: bool = False


_SAMPLING: Any = {name: (_KINDS[type(option.default)], option.default) for name, option in OPTIONS.items()}
_Sampled = create_model("_Sampled", __base__=_Body, **_SAMPLING)


class CompletionRequest(_Sampled):
    """POST /v1/completions. Ranges are those of `SamplingParams`, in whose words a value is refused."""

    prompt: Prompts = END_OF_TEXT
    model: str | None = None
    max_tokens: TokenCount = 16
    min_tokens: Count = 0
    logit_bias: LogitBias = ()
    # sample i is drawn with (seed + i) mod 2**32
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    stop: Stops = ()
    stop_token_ids: StopTokens = ()
    ignore_eos: bool = False
    n: Samples = 1
    best_of: Samples | None = None
    logprobs: Count | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    suffix: str | None = None


class ClassicRequest(_Body):
    """POST /complete, as the original: `top_p`, `temp` and `length` may be written as strings."""

    context: str
    top_p: Annotated[float, Field(strict=False)]
    temp: Annotated[float, Field(strict=False)]
    length: TokenCount = 256  # new tokens
    top_k: Count = 0
    stop: Stops = ()


class ErrorDetail(BaseModel):
    """Why a request was not served."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every answer that is not 200."""

    error: ErrorDetail


class Logprobs(BaseModel):
    """Of a choice's tokens, echoed ones too: natural logarithms under the model's own distribution."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Choice(BaseModel):
    """One completion."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None


class Usage(BaseModel):
    """Tokens of a request; a prompt counts once for its n samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionResponse(BaseModel):
    """The answer of POST /v1/completions; a stream's events have the same form."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None


class ClassicResponse(BaseModel):
    """The answer of POST /complete."""

    completion: str
