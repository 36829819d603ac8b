"""How a request is answered: with JSON, with OpenAI's error object, with a stream of events; and when its client has gone or
its time is over."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_MOST_CHARS = 1000  # of a message: it may repeat what the client sent
_LAST_WORDS_S = 30.0  # for the end of a stream, which perhaps nobody reads
T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ApiError(Exception):
    """A request is answered with `status` and {"error": {"message", "type", "param", "code"}}."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = message if len(message) <= _MOST_CHARS else f"{message[:_MOST_CHARS]}..."
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    def response(self) -> Response:
        """The whole answer."""
        return json_response(self.body, self.status, self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the request itself must change."""
    return ApiError(400, message, param=param)


def unavailable(message: str, *, code: str, retry_after_s: int) -> ApiError:
    """503: the same request may be served later."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(retry_after_s)})


def failed(message: str) -> ApiError:
    """500: the fault is the server's."""
    return ApiError(500, message)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer in ASCII: text may hold lone surrogates, which UTF-8 cannot write."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: Any) -> str:
    """JSON on one line; a number that is not finite is an error."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def to_event(content: Any) -> str:
    """A server-sent event that holds JSON."""
    return f"data: {to_json(content)}\n\n"


class ClientGone(ApiError):
    """Nobody waits for the answer any more, which this is then."""

    def __init__(self) -> None:
        super().__init__(499, "the client has closed its connection")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client closes its connection.

    The request's body must have been read.

    Raises:
        ClientGone: the client was first.
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
    """The seconds that a request may take, counted from here."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    async def within(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`.

        Raises:
            ApiError: 504, the time is over; `work` is cancelled.
        """
        try:
            async with asyncio.timeout_at(self._end):
                return await work
        except TimeoutError as error:
            message = f"the request took more than {self._seconds:g} seconds, this server's limit"
            raise ApiError(504, message, code="timeout") from error


class EventStream(Response):
    """Server-sent events, each sent as it comes. An error after the first is an event of its own; [DONE] is the last.

    Args:
        job: left when the answer is over or the client has gone, which cancels what is still computed.
        events: whole events, `data: ...` with the empty line behind it.
        limit: until the last event is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, job: contextlib.AbstractContextManager[Any], events: AsyncIterator[str], limit: TimeLimit
    ):
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
        async with asyncio.timeout(_LAST_WORDS_S):
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
