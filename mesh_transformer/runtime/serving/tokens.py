"""POST /tokenize and POST /detokenize, compatible with vLLM."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.runtime.serving.chat_protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.serving.protocol import ERRORS
from mesh_transformer.runtime.serving.responses import TimeLimit, invalid, json_response, unless_gone


def router(model: ServedModel) -> APIRouter:
    """The routes of tokens. They need the tokenizer only, and answer while the model warms up."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model=TokenizeResponse, responses=ERRORS)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await _respond(_tokenize(body, model), request, model)

    @routes.post("/detokenize", response_model=DetokenizeResponse, responses=ERRORS)
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return await _respond(_detokenize(body, model), request, model)

    return routes


async def _respond(work: Coroutine[Any, Any, dict[str, Any]], request: Request, model: ServedModel) -> Response:
    return json_response(await unless_gone(request.receive, TimeLimit(model.timeout_s).within(work)))


async def _tokenize(body: TokenizeRequest, model: ServedModel) -> dict[str, Any]:
    if body.model is not None:
        model.check_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either a prompt or messages", "prompt")
    if body.tools is not None and body.messages is None:
        raise invalid("tools need messages: a prompt has no place for them", "tools")
    text, special = body.prompt, body.add_special_tokens is not False
    if text is None:
        # a chat template writes the start token itself
        special = bool(body.add_special_tokens)
        text = await model.render(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            tools=body.tools,
            variables=body.chat_template_kwargs,
        )
    (tokens,) = await model.tokens([text], add_special_tokens=special)
    names = list(map(model.tokenizer.token_name, tokens)) if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.loop.context or None, "tokens": tokens, "token_strs": names}


async def _detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    if body.model is not None:
        model.check_name(body.model)
    if body.tokens:
        model.check([body.tokens], "tokens")
    (text,) = await model.decode([body.tokens], special_names=True)
    return {"prompt": text}
