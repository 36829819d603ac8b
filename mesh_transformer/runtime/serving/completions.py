"""POST /v1/completions and GET /v1/models, compatible with OpenAI and vLLM; POST /complete, the original program's
route."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.infer.requests import OPTIONS, SamplingParams
from mesh_transformer.runtime.serving.loop import GenerationJob
from mesh_transformer.runtime.serving.model import (
    ChoiceBuilder,
    Delta,
    Echo,
    ServedModel,
    follow,
    sampling_params,
)
from mesh_transformer.runtime.serving.protocol import (
    MAX_SEQUENCES,
    ClassicRequest,
    ClassicResponse,
    CompletionRequest,
    CompletionResponse,
    ErrorResponse,
)
from mesh_transformer.runtime.serving.responses import (
    ApiError,
    EventStream,
    TimeLimit,
    invalid,
    json_response,
    to_event,
    unless_gone,
)

ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse} for status in (400, 401, 404, 408, 413, 415, 500, 503, 504)
}


def router(model: ServedModel) -> APIRouter:
    """The routes that use the model."""
    # with a default, FastAPI does not document 422; this server sends 400 instead
    routes = APIRouter(responses={"default": {"model": ErrorResponse}})
    created = int(time.time())

    @routes.post("/v1/engines/{engine:path}/completions", response_model=CompletionResponse, responses=ERRORS)
    async def complete_by(engine: str, body: CompletionRequest, request: Request) -> Response:
        """The route that openai 0.28 calls with `engine=`."""
        _check_name(engine, model)
        return await complete(body, request)

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=ERRORS)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        _check(body, model)
        limit = TimeLimit(model.timeout_s)
        with contextlib.ExitStack() as stack:
            job = stack.enter_context(model.loop.reserve(len(body.prompt) * body.n))
            answer = await unless_gone(request.receive, limit.within(_start(body, model, job)))
            if not body.stream:
                return json_response(await unless_gone(request.receive, limit.within(answer.whole())))
            # EventStream exits the job
            stack.pop_all()
        return EventStream(job, answer.events(), limit)

    @routes.post("/complete", response_model=ClassicResponse, responses=ERRORS)
    async def complete_classic(body: ClassicRequest, request: Request) -> Response:
        if body.length < 1:
            raise invalid(f"length must be 1 or more; got {body.length}", "length")
        with model.loop.reserve(1) as job:
            work = TimeLimit(model.timeout_s).within(_complete_classic(body, model, job))
            return json_response({"completion": await unless_gone(request.receive, work)})

    @routes.get("/v1/chat/completions", status_code=404, response_model=ErrorResponse)
    @routes.post("/v1/chat/completions", status_code=404, response_model=ErrorResponse)
    async def chat() -> None:
        raise ApiError(404, "this server has no chat: send the text as `prompt` to POST /v1/completions")

    @routes.get("/v1/models", responses={401: ERRORS[401]})
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(model, created)]}

    @routes.get("/v1/models/{name:path}", responses={status: ERRORS[status] for status in (401, 404)})
    async def get_model(name: str) -> dict[str, Any]:
        _check_name(name, model)
        return _describe(model, created)

    return routes


async def _start(body: CompletionRequest, model: ServedModel, job: GenerationJob) -> ResponseBuilder:
    """Start the sequences of a request: n samples of each prompt, in order.

    Raises:
        ApiError: the request is invalid.
    """
    prompts = await _prompts(body, model)
    for prompt in prompts:
        model.check_room(prompt, body.max_tokens)
    params = _sampling(body, model, len(prompts))
    with_logprobs = body.logprobs is not None
    echoes = await _echoes(body, model, prompts) if body.echo else [None] * len(prompts)
    choices = [
        ChoiceBuilder(model, prompt, body.stop, min_tokens=body.min_tokens, echo=echo, logprobs=with_logprobs)
        for prompt, echo in zip(prompts, echoes, strict=True)
        for _ in range(body.n)
    ]
    repeated = [prompt for prompt in prompts for _ in range(body.n)]
    job.start(zip(repeated, params, strict=True))
    head = {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model.name,
    }
    return ResponseBuilder(body, job, choices, sum(map(len, prompts)), head)


@dataclasses.dataclass
class ResponseBuilder:
    """Builds the response to a request from the outputs of its sequences.

    Args:
        head: the fields that all objects of the response have.
    """

    body: CompletionRequest
    job: GenerationJob
    choices: Sequence[ChoiceBuilder]
    prompt_tokens: int
    head: dict[str, Any]

    async def whole(self) -> dict[str, Any]:
        """The response as one object."""
        deltas: list[list[Delta]] = [[] for _ in self.choices]
        async for index, delta in follow(self.job, self.choices):
            deltas[index].append(delta)
        choices = list(map(self._choice, range(len(deltas)), map(Delta.joined, deltas)))
        return {**self.head, "choices": choices, "usage": self._usage()}

    async def events(self) -> AsyncIterator[str]:
        """The response as server-sent events, without [DONE]."""
        with_usage = self.body.stream_options is not None and self.body.stream_options.include_usage
        usage = {"usage": None} if with_usage else {}
        async for index, delta in follow(self.job, self.choices):
            if any(delta):
                yield to_event({**self.head, "choices": [self._choice(index, delta)], **usage})
        if with_usage:
            yield to_event({**self.head, "choices": [], "usage": self._usage()})

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = {
            "tokens": [token.text for token in delta.tokens],
            "token_logprobs": [token.logprob for token in delta.tokens],
            "top_logprobs": [token.top for token in delta.tokens],
            "text_offset": [token.offset for token in delta.tokens],
        }
        shown = None if self.body.logprobs is None else logprobs
        return {"index": index, "text": delta.text, "logprobs": shown, "finish_reason": delta.finish_reason}

    def _usage(self) -> dict[str, int]:
        prompt, new = self.prompt_tokens, sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _check(body: CompletionRequest, model: ServedModel) -> None:
    """Raise ApiError for fields that are not supported or that contradict each other."""
    if body.model is not None:
        _check_name(body.model, model)
    if body.suffix:
        raise invalid("suffix: this model cannot insert text before a suffix; leave the field out", "suffix")
    if body.best_of not in (None, body.n):
        raise invalid(f"best_of {body.best_of} must be n ({body.n}): this server does not rank completions", "best_of")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options need a stream: set stream to true", "stream_options")
    if (prompts := len(body.prompt)) * body.n > MAX_SEQUENCES:
        raise invalid(f"{prompts} prompts x n {body.n} must be at most {MAX_SEQUENCES}, the limit of a request", "n")
    model.check([[token] for token, _ in body.logit_bias], "logit_bias")
    model.check([[token] for token in body.stop_token_ids], "stop_token_ids")


def _check_name(name: str, model: ServedModel) -> None:
    if name != model.name:
        message = f"there is no model {name[:100]!r}: this server has the model {model.name!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


async def _prompts(body: CompletionRequest, model: ServedModel) -> Sequence[Sequence[int]]:
    if isinstance(body.prompt[0], str):
        return await model.encode(body.prompt, "prompt")
    model.check(body.prompt, "prompt")
    return body.prompt


def _sampling(body: CompletionRequest, model: ServedModel, prompts: int) -> list[SamplingParams]:
    """The parameters of all choices: n samples of each prompt, in order. They differ in their seeds."""
    options = {name: getattr(body, name) for name in OPTIONS}
    # vLLM's value for all tokens
    if options["top_k"] == -1:
        options["top_k"] = 0
    params = sampling_params(
        **options,
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens,
        logit_bias=body.logit_bias,
        stop_token_ids=model.end_tokens(body.stop_token_ids, ignore_eos=body.ignore_eos),
        logprobs=body.logprobs,
        prompt_logprobs=body.echo and body.logprobs is not None,
    )
    if body.seed is None:
        seeds = [secrets.randbits(32) for _ in range(prompts * body.n)]
    else:
        seeds = [(body.seed + i) % 2**32 for i in range(body.n)] * prompts
    return [dataclasses.replace(params, seed=seed) for seed in seeds]


async def _echoes(body: CompletionRequest, model: ServedModel, prompts: Sequence[Sequence[int]]) -> list[Echo]:
    """For each prompt, the text at the start of its choices: the prompt as given, or the text of its tokens."""
    offsets = [[]] * len(prompts) if body.logprobs is None else await model.offsets(prompts)
    texts = body.prompt if isinstance(body.prompt[0], str) else await model.decode(prompts)
    return list(map(Echo, texts, offsets))


async def _complete_classic(body: ClassicRequest, model: ServedModel, job: GenerationJob) -> str:
    (prompt,) = await model.encode([body.context], "context")
    params = sampling_params(
        spelled={"temperature": "temp"},
        max_tokens=body.length,
        temperature=body.temp,
        top_p=body.top_p,
        top_k=body.top_k,
        stop_token_ids=model.end_tokens(),
        seed=secrets.randbits(32),
    )
    choice = ChoiceBuilder(model, prompt, body.stop)
    job.start([(prompt, params)], slide=True)
    return "".join([delta.text async for _, delta in follow(job, [choice])])


def _describe(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "mesh-transformer",
        # unknown until the server is ready
        "max_model_len": model.loop.context or None,
    }
