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
from mesh_transformer.infer.requests import OPTIONS, SamplingParams
from mesh_transformer.runtime.serving.access import client_of
from mesh_transformer.runtime.serving.answers import note_usage
from mesh_transformer.runtime.serving.loop import GenerationJob
from mesh_transformer.runtime.serving.model import ChoiceBuilder, Delta, Echo, ServedModel, follow, sampling_params
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


class ResponseFormat(Protocol):
    """The form of an endpoint's responses.

    Args:
        id_prefix: the start of the `id` of a response.
        whole_object, part_object: the `object` of a whole response, and of the events of a stream.
        logprobs: how many alternatives to list with each token. None: list no tokens.
        prompt_logprobs: list the prompt's tokens too.
    """

    id_prefix: str
    whole_object: str
    part_object: str
    logprobs: int | None
    prompt_logprobs: bool

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
        if value is not None and value not in neutral:
            raise invalid(f"{name} {short(value)} is not supported: {reason}; leave the field out", name)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options need a stream: set stream to true", "stream_options")
    model.check([[token] for token, _ in body.logit_bias], "logit_bias")
    model.check([[token] for token in body.stop_token_ids], "stop_token_ids")


async def _start(
    body: SampledRequest, model: ServedModel, form: ResponseFormat, prompts: Prompts, job: GenerationJob
) -> _Answer:
    """Start the sequences of a request: n samples of each prompt, in order."""
    made = await prompts()
    samples = [(prompt, params) for prompt in made for params in _samples(body, model, form, prompt.max_tokens)]
    choices = [
        ChoiceBuilder(
            model,
            prompt.tokens,
            body.stop,
            min_tokens=body.min_tokens,
            echo=prompt.echo,
            logprobs=form.logprobs is not None,
        )
        for prompt, _ in samples
    ]
    job.start((prompt.tokens, params) for prompt, params in samples)
    head = {"id": f"{form.id_prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model.name}
    usage = body.stream_options or StreamOptions()
    return _Answer(form, job, choices, sum(len(prompt.tokens) for prompt in made), head, usage)


def _samples(body: SampledRequest, model: ServedModel, form: ResponseFormat, max_tokens: int) -> list[SamplingParams]:
    """The parameters of the n samples of a prompt. They differ in their seeds."""
    options = {name: getattr(body, name) for name in OPTIONS}
    # vLLM's value for all tokens
    if options["top_k"] == -1:
        options["top_k"] = 0
    params = sampling_params(
        **options,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        logit_bias=body.logit_bias,
        stop_token_ids=model.end_tokens(body.stop_token_ids, ignore_eos=body.ignore_eos),
        logprobs=form.logprobs,
        prompt_logprobs=form.prompt_logprobs,
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

    form: ResponseFormat
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
        choices = list(map(self.form.choice, range(len(deltas)), map(Delta.joined, deltas)))
        return {"object": self.form.whole_object, **self.head, "choices": choices, "usage": self.token_counts()}

    async def events(self) -> AsyncIterator[str]:
        """The response as server-sent events, without [DONE]."""
        head = {"object": self.form.part_object, **self.head}
        begun: set[int] = set()
        async for index, delta in follow(self.job, self.choices):
            for part in self.form.parts(index, delta, first=index not in begun):
                yield to_event({**head, "choices": [part], **self._usage_so_far()})
            begun.add(index)
        if self.usage.include_usage:
            yield to_event({**head, "choices": [], "usage": self.token_counts()})

    def _usage_so_far(self) -> dict[str, Any]:
        if not self.usage.include_usage:
            return {}
        return {"usage": self.token_counts() if self.usage.continuous_usage_stats else None}

    def token_counts(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
