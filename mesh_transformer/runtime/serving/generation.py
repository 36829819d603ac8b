"""The path of a request that generates text, from its body to its response. The endpoints for completions and chats
share it: each gives its prompts and the form of its choices."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from fastapi import Request
from starlette.responses import Response

from mesh_transformer.config.describe import short
from mesh_transformer.infer.requests import OPTIONS, SamplingParams, Token, all_if_negative
from mesh_transformer.runtime.serving.access import client_of
from mesh_transformer.runtime.serving.answers import note_usage
from mesh_transformer.runtime.serving.fields import SAME_AS
from mesh_transformer.runtime.serving.loop import GenerationJob
from mesh_transformer.runtime.serving.model import (
    LEAST_LOGPROB,
    ChoiceBuilder,
    ChoiceOptions,
    Delta,
    Echo,
    ServedModel,
    follow,
    sampling_params,
)
from mesh_transformer.runtime.serving.protocol import SampledRequest, StreamOptions
from mesh_transformer.runtime.serving.responses import (
    EventStream,
    TimeLimit,
    invalid,
    json_response,
    to_event,
    unless_gone,
)


class Prompt(NamedTuple):
    """The start of n samples.

    Args:
        tokens: at least one token ID.
        max_tokens: the largest number of new tokens.
        echo: the text at the start of the choices.
    """

    tokens: Sequence[int]
    max_tokens: int
    echo: Echo | None = None


class Listed(Protocol):
    """The tokens that a choice lists.

    Args:
        logprobs: how many alternatives to list with each token. None: list no tokens.
        echoes_logprobs: list the prompt's tokens too.
    """

    logprobs: int | None
    echoes_logprobs: bool


class ResponseFormat(Listed, Protocol):
    """The form of an endpoint's responses.

    Args:
        id_prefix: the start of the `id` of a response.
        whole_object, part_object: the `object` of a whole response, and of the events of a stream.
        prompt_in_choice: whether what a request wants to know of its prompt is in each choice, or in the response.
    """

    id_prefix: str
    whole_object: str
    part_object: str
    prompt_in_choice: bool

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """A choice of a whole response."""

    def parts(self, index: int, delta: Delta, *, first: bool) -> Iterator[dict[str, Any]]:
        """The choices of the events of a delta. `first`: the choice has no event yet."""


# makes the prompts of a request, after the engine has places for its sequences
Prompts = Callable[[], Coroutine[Any, Any, Sequence[Prompt]]]


async def respond(
    request: Request, body: SampledRequest, model: ServedModel, form: ResponseFormat, prompts: Prompts, count: int
) -> Response:
    """The response to a request: one JSON object, or a stream of events.

    Args:
        count: the number of prompts.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it now.
    """
    limit = TimeLimit(model.timeout_s)
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(model.loop.reserve(count * body.n, client_of(request)))
        answer = await unless_gone(request.receive, limit.within(_start(body, model, form, prompts, job)))
        note_usage(request.scope, answer)
        if not body.stream:
            return json_response(await unless_gone(request.receive, limit.within(answer.response())))
        # EventStream exits the job
        stack.pop_all()
    return EventStream(job, answer.events(), limit)


def check(body: SampledRequest, model: ServedModel) -> None:
    """Raise ApiError for fields that are not supported, contradict each other, or name an unknown model or token."""
    if body.model is not None:
        model.check_name(body.model)
    for name, (reason, neutral) in body.refused.items():
        value = getattr(body, name)
        if value is not None and value not in neutral and not _repeats(body, model, name):
            raise invalid(f"{name} {short(value)} is not supported: {reason}; leave the field out", name)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options need a stream: set stream to true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid(
            "prompt_logprobs are not in a stream: leave the field out, or set stream to false", "prompt_logprobs"
        )
    model.check([[token] for token, _ in body.logit_bias], "logit_bias")
    model.check([[token] for token in body.allowed_token_ids], "allowed_token_ids")
    model.check([[token] for token in body.stop_token_ids], "stop_token_ids")


def token_names(model: ServedModel, body: SampledRequest) -> Callable[[int], str]:
    """The names of tokens in lists of log-probabilities: their texts, or their IDs."""
    return "token_id:{}".format if body.return_tokens_as_token_ids else model.token_text


def _repeats(body: SampledRequest, model: ServedModel, name: str) -> bool:
    """Whether a refused field only says again what another field of the request says, or the model's default of it."""
    return name in SAME_AS and getattr(body, name) == _options(body, model)[SAME_AS[name]]


def _options(body: SampledRequest, model: ServedModel) -> dict[str, Any]:
    """The sampling options: those of the request, else of the model, else of this program."""
    named = {name: getattr(body, name) for name in OPTIONS if name in body.model_fields_set}
    return {name: option.default for name, option in OPTIONS.items()} | dict(model.defaults) | named


async def start(
    body: SampledRequest, model: ServedModel, prompts: Sequence[Prompt], job: GenerationJob, listed: Listed
) -> list[ChoiceBuilder]:
    """Start the sequences of a request, n samples of each prompt, in order. Returns a builder for each of them.

    Raises:
        ApiError: 400, a field is out of its range.
    """
    words = await model.bad_words(body.bad_words) if body.bad_words else ()
    samples = [
        (prompt, params) for prompt in prompts for params in _samples(body, model, listed, prompt.max_tokens, words)
    ]
    options = ChoiceOptions(
        stops=body.stop,
        keep_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        special_names=not body.skip_special_tokens,
        logprobs=listed.logprobs,
        ids=body.return_token_ids,
    )
    choices = [ChoiceBuilder(model, prompt.tokens, options, echo=prompt.echo) for prompt, _ in samples]
    job.start((prompt.tokens, params) for prompt, params in samples)
    return choices


async def _start(
    body: SampledRequest, model: ServedModel, form: ResponseFormat, prompts: Prompts, job: GenerationJob
) -> _Answer:
    """Start the sequences of a request, and make its answer."""
    made = await prompts()
    choices = await start(body, model, made, job, form)
    head = {"id": f"{form.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}
    usage = body.stream_options or StreamOptions()
    return _Answer(body, form, model, job, choices, sum(len(prompt.tokens) for prompt in made), head, usage)


def _samples(
    body: SampledRequest,
    model: ServedModel,
    listed: Listed,
    max_tokens: int,
    bad_words: tuple[tuple[int, ...], ...],
) -> list[SamplingParams]:
    """The parameters of the n samples of a prompt. They differ in their seeds."""
    options = _options(body, model)
    options["top_k"] = all_if_negative(options["top_k"])
    prompt_logprobs = [body.prompt_logprobs] if body.prompt_logprobs is not None else []
    if listed.echoes_logprobs and listed.logprobs is not None:
        prompt_logprobs.append(listed.logprobs)
    params = sampling_params(
        **options,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        logit_bias=body.logit_bias,
        allowed_token_ids=body.allowed_token_ids,
        bad_words=bad_words,
        stop_token_ids=model.end_tokens(body.stop_token_ids, ignore_eos=body.ignore_eos),
        logprobs=listed.logprobs,
        prompt_logprobs=max(prompt_logprobs, default=None),
    )
    if body.seed is None:
        seeds = [secrets.randbits(32) for _ in range(body.n)]
    else:
        seeds = [(body.seed + i) % 2**32 for i in range(body.n)]
    return [dataclasses.replace(params, seed=seed) for seed in seeds]


@dataclasses.dataclass
class _Answer:
    """Builds the response to a request from the outputs of its sequences.

    Args:
        head: the fields that all objects of the response have.
        usage: which events of a stream have the usage.
    """

    body: SampledRequest
    form: ResponseFormat
    model: ServedModel
    job: GenerationJob
    choices: Sequence[ChoiceBuilder]
    prompt_tokens: int
    head: dict[str, Any]
    usage: StreamOptions

    async def response(self) -> dict[str, Any]:
        """The response as one object."""
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        async for index, delta in follow(self.job, self.choices):
            deltas[index].append(delta)
        choices = []
        for index, delta in enumerate(map(Delta.joined, deltas)):
            choice = self.form.choice(index, delta)
            if self.body.return_token_ids:
                choice["token_ids"] = delta.ids
            if self.form.prompt_in_choice:
                choice.update(self._of_prompt(index))
            choices.append(choice)
        head = self.head if self.form.prompt_in_choice else {**self.head, **self._of_prompt(0)}
        return {"object": self.form.whole_object, **head, "choices": choices, "usage": self.token_counts()}

    async def events(self) -> AsyncIterator[str]:
        """The response as server-sent events, without [DONE]."""
        head = {"object": self.form.part_object, **self.head}
        begun: set[int] = set()
        async for index, delta in follow(self.job, self.choices):
            parts = list(self.form.parts(index, delta, first=index not in begun))
            of_prompt = {} if index in begun else self._of_prompt(index)
            if self.body.return_token_ids and parts:
                parts[-1]["token_ids"] = delta.ids
            for number, part in enumerate(parts):
                of_part = {} if number else of_prompt
                if self.form.prompt_in_choice:
                    part.update(of_part)
                    of_part = {}
                yield to_event({**head, **of_part, "choices": [part], **self._usage_so_far()})
            if parts:
                begun.add(index)
        if self.usage.include_usage:
            yield to_event({**head, "choices": [], "usage": self.token_counts()})

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """What the request wants to know of the prompt of a choice."""
        choice, fields = self.choices[index], dict[str, Any]()
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = list(choice.prompt)
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [None, *map(self._scored, choice.prompt_scores)]
        return fields

    def _scored(self, token: Token) -> dict[str, Any]:
        """A token of the prompt and the most likely ones at its place, by their IDs."""
        ranked = ((id, logprob, rank) for rank, (id, logprob) in enumerate(token.top[: self.body.prompt_logprobs], 1))
        entries: dict[str, Any] = {}
        for id, logprob, rank in [(token.id, token.logprob, token.rank), *ranked]:
            named = {"rank": rank, "decoded_token": self.model.token_text(id)}
            entries.setdefault(str(id), {"logprob": max(LEAST_LOGPROB, logprob), **named})
        return entries

    def _usage_so_far(self) -> dict[str, Any]:
        if not self.usage.include_usage:
            return {}
        return {"usage": self.token_counts() if self.usage.continuous_usage_stats else None}

    def token_counts(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
