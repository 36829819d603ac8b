"""GET /v1/models: the one model of this server."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.serving.protocol import ERRORS


def router(model: ServedModel) -> APIRouter:
    """The routes that describe the model."""
    routes = APIRouter()
    created = int(time.time())

    @routes.get("/v1/models", responses={401: ERRORS[401]})
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_describe(model, created)]}

    @routes.get("/v1/models/{name:path}", responses={status: ERRORS[status] for status in (401, 404)})
    async def get_model(name: str) -> dict[str, Any]:
        model.check_name(name)
        return _describe(model, created)

    return routes


def _describe(model: ServedModel, created: int) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "mesh-transformer",
        # unknown until the server is ready
        "max_model_len": model.loop.context or None,
        "chat": model.chat_template is not None,
    }
