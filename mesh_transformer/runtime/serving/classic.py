"""POST /complete, the original program's route."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request
from starlette.responses import Response

from mesh_transformer.runtime.serving.access import client_of
from mesh_transformer.runtime.serving.loop import GenerationJob
from mesh_transformer.runtime.serving.model import ChoiceBuilder, ChoiceOptions, ServedModel, follow, sampling_params
from mesh_transformer.runtime.serving.protocol import ERRORS, ClassicRequest, ClassicResponse
from mesh_transformer.runtime.serving.responses import TimeLimit, invalid, json_response, unless_gone


def router(model: ServedModel) -> APIRouter:
    """The original program's route."""
    routes = APIRouter()

    @routes.post("/complete", response_model=ClassicResponse, responses=ERRORS)
    async def complete_classic(body: ClassicRequest, request: Request) -> Response:
        if body.length < 1:
            raise invalid(f"length must be 1 or more; got {body.length}", "length")
        with model.loop.reserve(1, client_of(request)) as job:
            work = TimeLimit(model.timeout_s).within(_complete(body, model, job))
            return json_response({"completion": await unless_gone(request.receive, work)})

    return routes


async def _complete(body: ClassicRequest, model: ServedModel, job: GenerationJob) -> str:
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
    choice = ChoiceBuilder(model, prompt, ChoiceOptions(stops=body.stop))
    job.start([(prompt, params)], slide=True)
    return "".join([delta.text async for _, delta in follow(job, [choice])])
