"""What a client is told when its request cannot be served: a status code and OpenAI's error object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_MOST_CHARS = 1000  # of a message: it may repeat what the client sent


class ApiError(Exception):
    """A request is answered with `status` and {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = message if len(message) <= _MOST_CHARS else f"{message[:_MOST_CHARS]}..."
        super().__init__(message)
        self.status, self.headers = status, headers
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the request itself must change."""
    return ApiError(400, message, param=param)


def unavailable(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """503: the same request may be served later."""
    return ApiError(503, message, kind="server_error", code=code, headers={"Retry-After": str(retry_after_s)})


def failed(message: str) -> ApiError:
    """500: the fault is the server's."""
    return ApiError(500, message, kind="server_error")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer in ASCII: text may hold lone surrogates, which UTF-8 cannot write."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: Any) -> str:
    """JSON on one line; a number that is not finite is an error."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)
