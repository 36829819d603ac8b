"""Responses: JSON, OpenAI's error object, server-sent events. Also time limits, and clients that disconnect."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

# limit for error messages, because they can quote the client's input
_MAX_MESSAGE_CHARS = 1000
# time to send the end of a stream; the client may not read it
_STREAM_END_S = 30.0
T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ApiError(Exception):
    """An error response: `status` and {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = message if len(message) <= _MAX_MESSAGE_CHARS else f"{message[:_MAX_MESSAGE_CHARS]}..."
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The response with this error."""
        return json_response(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the client must change the request."""
    return ApiError(400, message, param=param)


def unavailable(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """503: the same request may succeed later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def failed(message: str) -> ApiError:
    """500: the server failed."""
    return ApiError(500, message)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, because a text may contain lone surrogates, which UTF-8 cannot encode."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: Any) -> str:
    """JSON on one line. Raises ValueError for a number that is not finite."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def to_event(content: Any) -> str:
    """A server-sent event with JSON data."""
    return f"data: {to_json(content)}\n\n"


class ClientGone(ApiError):
    """The client closed its connection before the response."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed its connection")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled as soon as the client closes its connection.

    The body of the request must have been read.

    Raises:
        ClientGone: the client closed its connection.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


class TimeLimit:
    """The time limit of a request, from the creation of this object."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            ApiError: 504, the time limit passed. `work` is cancelled.
        """
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError as error:
            message = f"the request took longer than {self._seconds:g} seconds, the limit of this server"
            raise ApiError(504, message, code="timeout") from error


class EventStream(Response):
    """A response of server-sent events. An error is sent as an event, and [DONE] is the last event.

    Args:
        job: a context manager. Its exit, at the end of the response or when the client disconnects, cancels the
            sequences.
        events: complete events, `data: ...` with the empty line after it.
        limit: the time limit for sending all events.
    """

    media_type = "text/event-stream"

    def __init__(self, job: contextlib.AbstractContextManager[Any], events: AsyncIterator[str], limit: TimeLimit):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._job, self._events, self._limit = job, events, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._job, contextlib.suppress(ClientGone, TimeoutError):
            await unless_gone(receive, self._answer(send))

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        end = DONE
        try:
            await self._limit.within(self._send_all(send))
        except ApiError as error:
            end = to_event(error.body) + DONE
        async with asyncio.timeout(_STREAM_END_S):
            await _send(send, end)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await _send(send, event)


async def _send(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": text.encode("ascii"), "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
