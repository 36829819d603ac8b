"""What operators see of each answer: a request ID, a count by route and status, and, if they want it, a line in the
log. No line has a text of a request or an answer."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh_transformer.logs import log
from mesh_transformer.runtime.serving.loop import Metrics

REQUEST_ID = "x-request-id"
_GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# of paths that the server does not have
_UNKNOWN = "unknown"
_USAGE = "mesh_transformer.usage"


class Usage(Protocol):
    """Counts the tokens of a request so far."""

    def token_counts(self) -> dict[str, int]:
        """`prompt_tokens` and `completion_tokens`."""


def note_usage(scope: Scope, usage: Usage) -> None:
    """Let the line of a request have its tokens."""
    scope[_USAGE] = usage


class AnswerMiddleware:
    """An ASGI middleware around all others.

    Args:
        paths: gives the templates of paths, for answers that are given before a route is chosen.
        metrics: counts the answers.
        lines: whether to log a line for each answer.
    """

    def __init__(self, app: ASGIApp, paths: Callable[[], Iterable[str]], metrics: Metrics, *, lines: bool):
        self._app, self._paths, self._metrics, self._lines = app, paths, metrics, lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _Answer(scope)

        async def send_noted(message: Message) -> None:
            answer.note(message)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._end(scope, answer)

    def _end(self, scope: Scope, answer: _Answer) -> None:
        route = self._route(scope)
        # a client that leaves before its answer has none
        status = "none" if answer.status is None else str(answer.status)
        self._metrics.answers.labels(route, status).inc()
        if self._lines:
            usage = scope[_USAGE].token_counts() if _USAGE in scope else {}
            log.info(
                "answer id=%s route=%s status=%s prompt_tokens=%d completion_tokens=%d first_ms=%.1f total_ms=%.1f",
                *(answer.id, route, status, usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)),
                *(1000 * answer.first_s, 1000 * (time.monotonic() - answer.began)),
            )

    def _route(self, scope: Scope) -> str:
        """The template of the path, such as /v1/models/{name}."""
        if path := getattr(scope.get("route"), "path", None):
            return str(path)
        matching = (path for path in self._paths() if compile_path(path)[0].match(scope["path"]))
        return next(matching, _UNKNOWN)


class _Answer:
    """The ID, the status and the times of an answer."""

    def __init__(self, scope: Scope):
        given = Headers(scope=scope).get(REQUEST_ID, "")
        self.id = given if _GIVEN_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.began = time.monotonic()
        self.status: int | None = None
        # from the request to the first bytes of the body
        self.first_s = 0.0

    def note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)[REQUEST_ID] = self.id
        elif message.get("body") and not self.first_s:
            self.first_s = time.monotonic() - self.began
