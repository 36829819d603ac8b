"""POST /complete, the original's own route."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.runtime.serve.choices import Choice, follow
from mesh_transformer.runtime.serve.completions import ERRORS
from mesh_transformer.runtime.serve.connection import unless_gone, within
from mesh_transformer.runtime.serve.errors import invalid, json_response
from mesh_transformer.runtime.serve.loop import SequenceRequest
from mesh_transformer.runtime.serve.model import ServedModel, sampling_params
from mesh_transformer.runtime.serve.protocol import ClassicRequest, ClassicResponse

PATH = "/complete"


def router(model: ServedModel) -> APIRouter:
    """The route /complete; its CORS headers are the guard's work, since errors need them too."""
    routes = APIRouter()

    @routes.post(PATH, response_model=ClassicResponse, responses=ERRORS)
    async def complete(body: ClassicRequest, request: Request) -> Response:
        model.loop.check_ready()
        (prompt,) = await model.encode([body.context], "context")
        if body.length < 1:
            raise invalid(f"length must be 1 or more; got {body.length}", "length")
        model.check_room(prompt, 1, "context")
        params = sampling_params(
            {"temperature": "temp"},
            max_tokens=min(body.length, model.loop.context - len(prompt)),
            temperature=body.temp,
            top_p=body.top_p,
            top_k=body.top_k,
            stop_token_ids=model.end_tokens(),
            seed=secrets.randbits(32),
        )
        choice = Choice(model, prompt, body.stop, echo=None, logprobs=False)
        with model.loop.submit([SequenceRequest(prompt, params)]) as job:

            async def text() -> str:
                return "".join([delta.text async for _, delta in follow(job, [choice])])

            completion = await unless_gone(request.receive, within(model.timeout_s, text()))
        return json_response({"completion": completion})

    @routes.options(PATH, status_code=204, response_class=Response)
    def preflight() -> Response:
        return Response(status_code=204)

    return routes
