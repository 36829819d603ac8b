"""Answers that end early: a client that goes away, a request that takes too long."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mesh_transformer.runtime.serve.errors import ApiError, to_json
from mesh_transformer.runtime.serve.loop import Job

_LAST_WORDS_S = 30.0  # for the end of a stream, which perhaps nobody reads
T = TypeVar("T")
DONE = "data: [DONE]\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


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
            raise ApiError(
                504,
                f"the request took more than {self._seconds:g} seconds, this server's limit",
                kind="server_error",
                code="timeout",
            ) from error


class EventStream(Response):
    """Server-sent events, each sent as it comes. An error after the first is an event of its own; [DONE] is the last.

    Args:
        job: what computes; left, and so cancelled, when the answer is over or the client goes away.
        events: whole events, `data: ...` with the empty line behind it.
        limit: until the last event is sent.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, events: AsyncIterator[str], limit: TimeLimit):
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
            end = f"data: {to_json(error.body)}\n\n{DONE}"
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
