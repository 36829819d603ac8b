"""POST /v1/chat/completions, compatible with OpenAI and vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.config.describe import short
from mesh_transformer.runtime.serving import generation
from mesh_transformer.runtime.serving.chat_protocol import ChatRequest, ChatResponse
from mesh_transformer.runtime.serving.generation import Prompt, token_names
from mesh_transformer.runtime.serving.model import Delta, ListedToken, ServedModel
from mesh_transformer.runtime.serving.protocol import ERRORS
from mesh_transformer.runtime.serving.responses import invalid


def router(model: ServedModel) -> APIRouter:
    """The route of chats."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatResponse, responses=ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        check(body, model)
        form = _ChatFormat(model, token_names(model, body), (body.top_logprobs or 0) if body.logprobs else None)
        return await generation.respond(request, body, model, form, lambda: prompts_of(body, model), count=1)

    return routes


def check(body: ChatRequest, model: ServedModel) -> None:
    """Raise ApiError for fields that are not supported or that contradict each other."""
    generation.check(body, model)
    model.check_chat()
    if body.tool_choice not in (None, "none"):
        choice = f"tool_choice {short(body.tool_choice)}"
        if body.tools is None:
            raise invalid(f"{choice} needs tools: give tools, or leave the field out", "tool_choice")
        # a text is an answer to auto too
        if body.tool_choice != "auto":
            reason = "this server does not write tool calls yet"
            raise invalid(f"{choice} is not supported: {reason}; use auto or none", "tool_choice")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs need logprobs: set logprobs to true", "top_logprobs")
    for name in ("max_tokens", "max_completion_tokens"):
        if getattr(body, name) == 0:
            raise invalid(f"{name} must be 1 or more; got 0", name)


async def prompts_of(body: ChatRequest, model: ServedModel) -> list[Prompt]:
    """The prompt of the messages. Without max_completion_tokens, the answer may fill the context.

    Raises:
        ApiError: 400, the template refuses the messages, or they do not fit the context.
    """
    text = await model.render(
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=body.tools,
        variables=body.variables,
    )
    # the template has written the start token
    (tokens,) = await model.encode([text], "messages", add_special_tokens=False)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    model.check_room(tokens, 1 if asked is None else asked, "messages")
    most = model.loop.context - len(tokens) if asked is None else asked
    return [Prompt(tokens, most)]


@dataclasses.dataclass
class _ChatFormat:
    """See `generation.ResponseFormat`."""

    model: ServedModel
    name: Callable[[int], str]
    logprobs: int | None
    echoes_logprobs: bool = False
    prompt_in_choice: bool = False
    id_prefix: str = "chatcmpl"
    whole_object: str = "chat.completion"
    part_object: str = "chat.completion.chunk"

    def choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": index, "message": message, **self._ends(delta)}

    def parts(self, index: int, delta: Delta, *, first: bool) -> Iterator[dict[str, Any]]:
        if first:
            role = {"role": "assistant", "content": ""}
            yield {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
        if any(delta):
            content = {"content": delta.text} if delta.text else {}
            yield {"index": index, "delta": content, **self._ends(delta)}

    def _ends(self, delta: Delta) -> dict[str, Any]:
        listed = None if self.logprobs is None else {"content": list(map(self._listed, delta.tokens)), "refusal": None}
        return {"logprobs": listed, "finish_reason": delta.finish_reason}

    def _listed(self, token: ListedToken) -> dict[str, Any]:
        return {**self._named(token.id, token.logprob), "top_logprobs": [self._named(*other) for other in token.top]}

    def _named(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self.model.tokenizer.token_bytes(token)
        return {"token": self.name(token), "logprob": logprob, "bytes": list(raw)}
