"""The ASGI application: the routes, and all errors as OpenAI's error object."""

from collections.abc import Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from mesh_transformer import __version__
from mesh_transformer.config.describe import short
from mesh_transformer.runtime.serving import chat, classic, completions, models, page, tokens
from mesh_transformer.runtime.serving.access import AccessMiddleware
from mesh_transformer.runtime.serving.answers import AnswerMiddleware
from mesh_transformer.runtime.serving.cors import Cors
from mesh_transformer.runtime.serving.hosts import HostNames
from mesh_transformer.runtime.serving.keys import ApiKeys
from mesh_transformer.runtime.serving.loop import EngineLoop
from mesh_transformer.runtime.serving.model import ServedModel
from mesh_transformer.runtime.serving.protocol import ErrorResponse, fault_line
from mesh_transformer.runtime.serving.responses import ApiError, failed, invalid, json_response

_SHOWN_FAULTS = 3
_UNREADABLE = (
    "the body cannot be read as JSON: it is not UTF-8, is nested too deeply, or has a number with too many digits"
)


def make_app(
    model: ServedModel, keys: ApiKeys, allow_origins: Sequence[str], names: HostNames, *, access_log: bool = False
) -> ASGIApp:
    """The application for uvicorn.

    Args:
        keys: the API keys; a request needs one of them, if there are any.
        allow_origins: see `Cors`. Empty: "*" if there are keys, else no other origins.
        names: by which the server may be asked.
        access_log: whether to log a line for each answer.
    """
    app = make_routes(model)
    cors = Cors(allow_origins or (["*"] if keys.required else []), names)
    access = AccessMiddleware(app, keys, cors, names, model.timeout_s)
    return AnswerMiddleware(access, lambda: app.openapi()["paths"], model.loop.metrics, lines=access_log)


def make_routes(model: ServedModel) -> FastAPI:
    """The routes, without limits, keys and other checks of a request before them."""
    app = FastAPI(title="mesh-transformer", version=__version__, docs_url=None, redoc_url=None)
    for endpoint in (completions, chat, classic, tokens, models):
        app.include_router(
            endpoint.router(model),
            dependencies=[Depends(_check_content_type)],
            # with a default, FastAPI does not document 422; this server sends 400 instead
            responses={"default": {"model": ErrorResponse}},
        )
    app.include_router(page.router())
    _add_state_routes(app, model.loop)
    _add_error_handlers(app)
    return app


async def _check_content_type(request: Request) -> None:
    """Raise ApiError 400 for a body that is not sent as JSON.

    A web page of any origin may send a body of other types, or of none, without a preflight. FastAPI before 0.132 reads
    a body without a type as JSON.
    """
    given = request.headers.get("content-type", "")
    if request.method == "POST" and given.partition(";")[0].strip().lower() != "application/json":
        kind = f"Content-Type {short(given)}" if given else "no Content-Type"
        raise invalid(f"the body has {kind}: send JSON with Content-Type: application/json")


def _add_state_routes(app: FastAPI, loop: EngineLoop) -> None:
    @app.get("/health", responses={503: {"description": "warming up, draining or failed"}})
    async def health() -> Response:
        counts = loop.program_counts
        programs = {"programs": counts.compiled, "compiling": counts.compiling}
        return json_response({"status": loop.state, **programs}, 200 if loop.state == "ok" else 503)

    @app.get("/live", responses={503: {"description": "failed"}})
    async def live() -> Response:
        return json_response({"status": loop.state}, 503 if loop.state == "failed" else 200)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {CONTENT_TYPE_LATEST: {}}}})
    async def metrics() -> Response:
        return Response(loop.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}


# in lists of routes
_FIRST = ("/v1/chat/completions", " /v1/completions", "/v1/models", "tokenize")


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def not_valid(_: Request, error: RequestValidationError) -> Response:
        faults = error.errors()
        place = [str(part) for part in faults[0]["loc"][1:] if faults[0]["type"] != "json_invalid"]
        message = "; ".join(map(_fault, faults[:_SHOWN_FAULTS]))
        return ApiError(400, message, param=place[0] if place else None).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path, message = short(request.scope["path"]), str(error.detail)
        if error.status_code == 400:
            # FastAPI raises it for a body that is not JSON
            message = _UNREADABLE
        elif error.status_code == 404:
            message = f"this server has no {path}; it has {', '.join(_endpoints(app))}"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            message = f"{path} does not take {request.method}: use {allowed}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def bug(_: Request, __: Exception) -> Response:
        return failed("the server failed to answer this request; see its log").response()


def _endpoints(app: FastAPI) -> list[str]:
    """The documented routes, such as POST /v1/completions, those that people want first."""
    paths = app.openapi()["paths"].items()
    routes = [f"{method.upper()} {path}" for path, operations in paths for method in operations]
    return sorted(routes, key=lambda route: next((n for n, path in enumerate(_FIRST) if path in route), len(_FIRST)))


def _fault(fault: dict[str, Any]) -> str:
    """A line for a validation error of FastAPI."""
    if fault["loc"] == ("body",):
        return "the body must be a JSON object"
    if fault["type"] == "json_invalid":
        return f"the body is not JSON: {fault['ctx']['error']} at character {fault['loc'][1]}"
    return fault_line(fault, fault["loc"][1:])
