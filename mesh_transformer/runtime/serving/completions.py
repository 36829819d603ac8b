"""POST /v1/completions, compatible with OpenAI and vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.runtime.serving import generation
from mesh_transformer.runtime.serving.generation import Prompt, token_names
from mesh_transformer.runtime.serving.model import Delta, Echo, ListedToken, ServedModel
from mesh_transformer.runtime.serving.protocol import ERRORS, MAX_SEQUENCES, CompletionRequest, CompletionResponse
from mesh_transformer.runtime.serving.responses import invalid


def router(model: ServedModel) -> APIRouter:
    """The routes of completions."""
    routes = APIRouter()

    @routes.post("/v1/engines/{engine:path}/completions", response_model=CompletionResponse, responses=ERRORS)
    async def complete_by(engine: str, body: CompletionRequest, request: Request) -> Response:
        """The route that openai 0.28 calls with `engine=`."""
        model.check_name(engine)
        return await complete(body, request)

    @routes.post("/v1/completions", response_model=CompletionResponse, responses=ERRORS)
    async def complete(body: CompletionRequest, request: Request) -> Response:
        check(body, model)
        form = _CompletionFormat(model, token_names(model, body), body.logprobs, body.echo)
        return await generation.respond(
            request, body, model, form, lambda: prompts_of(body, model), count=len(body.prompt)
        )

    return routes


def check(body: CompletionRequest, model: ServedModel) -> None:
    """Raise ApiError for fields that are not supported or that contradict each other."""
    generation.check(body, model)
    if body.suffix:
        raise invalid("suffix: this model cannot insert text before a suffix; leave the field out", "suffix")
    if body.best_of not in (None, body.n):
        raise invalid(f"best_of {body.best_of} must be n ({body.n}): this server does not rank completions", "best_of")
    if (prompts := len(body.prompt)) * body.n > MAX_SEQUENCES:
        raise invalid(f"{prompts} prompts x n {body.n} must be at most {MAX_SEQUENCES}, the limit of a request", "n")


async def prompts_of(body: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """The prompts of a request. Raises ApiError 400 if one is not usable or does not fit the context."""
    if isinstance(body.prompt[0], str):
        prompts = await model.encode(body.prompt, "prompt", add_special_tokens=body.add_special_tokens)
    else:
        model.check(body.prompt, "prompt")
        prompts = body.prompt
    for prompt in prompts:
        model.check_room(prompt, body.max_tokens, "prompt", by_default="max_tokens" not in body.model_fields_set)
    echoes = await _echoes(body, model, prompts) if body.echo else [None] * len(prompts)
    return [Prompt(prompt, body.max_tokens, echo) for prompt, echo in zip(prompts, echoes, strict=True)]


async def _echoes(body: CompletionRequest, model: ServedModel, prompts: Sequence[Sequence[int]]) -> list[Echo]:
    """For each prompt, the text at the start of its choices: the prompt as given, or the text of its tokens."""
    as_text = isinstance(body.prompt[0], str)
    # a text need not have the names of the tokens that the tokenizer puts around it
    names = not body.skip_special_tokens and not as_text
    offsets = [[]] * len(prompts) if body.logprobs is None else await model.offsets(prompts, special_names=names)
    texts = body.prompt if as_text else await model.decode(prompts, special_names=names)
    return list(map(Echo, texts, offsets))


@dataclasses.dataclass
class _CompletionFormat:
    """See `generation.ResponseFormat`."""

    model: ServedModel
    name: Callable[[int], str]
    logprobs: int | None
    echoes_logprobs: bool
    prompt_in_choice: bool = True
    id_prefix: str = "cmpl"
    whole_object: str = "text_completion"
    part_object: str = "text_completion"

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else self._listed(delta.tokens)
        return {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}

    def parts(self, index: int, delta: Delta, *, first: bool) -> Iterator[dict[str, Any]]:
        if any(delta):
            yield self.choice(index, delta)

    def _listed(self, tokens: Sequence[ListedToken]) -> dict[str, Any]:
        return {
            "tokens": [self.name(token.id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [None if token.logprob is None else self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: ListedToken) -> dict[str, float | None]:
        """The log-probabilities of a token and its alternatives, by their texts. Two tokens may have one text."""
        top = {self.name(token.id): token.logprob}
        for other, logprob in token.top:
            if other != token.id:
                name = self.name(other)
                top[f"token_id:{other}" if name in top else name] = logprob
        return top
