"""What stands before every route. `BoundedConnection`: how long and how often a client may keep a socket. `AccessMiddleware`: the API key,
the size of a body and the time it may take, CORS, HEAD."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh_transformer.runtime.serving.responses import ApiError, ClientGone, invalid, to_json, unavailable

# for a request's head to come, from when the socket is open or a byte follows the answer before
HEAD_S = 15.0
STALL_S = 30.0  # for what was sent to be taken, besides its bytes at the slowest rate
SLOWEST_BYTES_A_SECOND = 16 << 10
_REFUSED_S = 1.0  # for the words of a refusal to arrive
MAX_BODY_BYTES = 4 << 20
# of all requests that are not answered, and of those of one client
MAX_BODIES_BYTES, MAX_CLIENT_BODIES_BYTES = 64 << 20, 16 << 20
SMALL_BODY_BYTES = 4 << 10  # so much of each body counts for nothing: a short request always has room
MAX_BODY_S = 60.0  # for a body to arrive
OPEN_PATHS = frozenset({"/", "/health", "/version", "/openapi.json"})  # need no key
_CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Headers": "*, Authorization",  # the asterisk does not cover that one
    "Access-Control-Allow-Methods": "*",
    "Access-Control-Expose-Headers": "Retry-After",
    "Access-Control-Max-Age": "7200",
}


class AccessMiddleware:
    """An ASGI application around another.

    Args:
        keys: a request needs one of them as `Authorization: Bearer KEY`; empty: none is needed.
        timeout_s: seconds that a request may take; a body gets no more of them than MAX_BODY_S.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes], timeout_s: float):
        self._app, self._keys = app, [_digest(key) for key in keys]
        self._body_s = min(timeout_s, MAX_BODY_S)
        self._body_bytes: Counter[str] = Counter()  # bytes of all bodies, by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _for_pages(scope["path"]):
            send = _with_cors(send)
        if scope["method"] == "HEAD":  # uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        usage, refusal = _BodyUsage((scope["client"] or ("",))[0]), None
        try:
            await self._answer(scope, receive, send, usage)
        except ApiError as error:
            refusal = error.response()
        finally:
            self._body_bytes[usage.client] -= usage.bytes
            self._body_bytes += Counter()  # forgets who holds nothing
        if refusal is not None:
            await _refuse(refusal, usage, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, usage: _BodyUsage) -> None:
        headers = Headers(scope=scope)
        _check_framing(headers)
        if scope["method"] == "OPTIONS" and _for_pages(scope["path"]):
            await Response(status_code=204)(scope, receive, send)
            return
        if scope["path"] not in OPEN_PATHS:
            self._check_key(headers.get("authorization", ""))
        _check_encoding(headers.get("content-encoding", "identity"))
        _check_size(int(headers.get("content-length", "0")))
        try:
            async with asyncio.timeout(self._body_s):
                body = await self._read(receive, usage)
        except TimeoutError as error:
            message = f"the body did not come within {self._body_s:g} seconds"
            raise ApiError(408, message, code="timeout") from error
        await self._app(scope, _replay(body, receive), send)

    def _check_key(self, authorization: str) -> None:
        """Raises ApiError, 401. Every key is compared, each in a time that depends on no key."""
        scheme, _, given = authorization.partition(" ")
        digest = _digest(given.strip().encode("latin-1"))
        found = [hmac.compare_digest(digest, key) for key in self._keys]
        if self._keys and (scheme.lower() != "bearer" or not any(found)):
            message = "this server needs an API key, as the header Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _read(self, receive: Receive, usage: _BodyUsage) -> bytes:
        """The whole body, at most MAX_BODY_BYTES however it is sent.

        Raises:
            ApiError: 413, it is larger; 503, all bodies together are too large, or those of its client.
            ClientGone: it never came to its end.
        """
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            usage.unread = message.get("more_body", False)
            body += message.get("body", b"")
            _check_size(len(body))
            more = max(0, len(body) - SMALL_BODY_BYTES) - usage.bytes
            usage.bytes += more
            self._body_bytes[usage.client] += more
            if (
                self._body_bytes[usage.client] > MAX_CLIENT_BODIES_BYTES
                or self._body_bytes.total() > MAX_BODIES_BYTES
            ):
                raise unavailable("too many large requests at once", code="queue_full", retry_after_s=1)
            if not usage.unread:
                return bytes(body)


class _BodyUsage:
    """What one request has of `AccessMiddleware._body_bytes`, and whether its body is read."""

    def __init__(self, client: str) -> None:
        self.client = client  # its address
        self.bytes = 0
        self.unread = True  # there is more to come of its body


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _refuse(response: Response, usage: _BodyUsage, receive: Receive, send: Send) -> None:
    """Answer before the body has come, and read the rest of it: a socket that is closed with unread bytes is reset, and the
    client loses the answer."""
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAD_S):
            while usage.unread:
                usage.unread = (await receive()).get("more_body", False)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_framing(headers: Headers) -> None:
    """Raises ApiError, 400, for a body with two lengths, of which a proxy may believe the other (RFC 9112, 6.1)."""
    if "transfer-encoding" in headers and "content-length" in headers:
        message = "the request has both Transfer-Encoding and Content-Length: send one of them"
        raise ApiError(400, message, headers={"Connection": "close"})


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body is over {MAX_BODY_BYTES} bytes, this server's limit")


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r}: send the body as it is, not compressed")


def _for_pages(path: str) -> bool:
    """Whether pages of other origins may call a path: the APIs, whose errors too a page must be able to read, and
    whether they are ready."""
    return path in ("/complete", "/health") or path.startswith("/v1/")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, whole, and then what comes after it."""
    whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return whole.pop() if whole else await receive()

    return next_message


def _with_cors(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_CORS)
        await send(message)

    return send_with_headers


class BoundedConnection(H11Protocol):
    """A client's socket. What takes longer than the limits is cut off, which cancels the request, if there is one.

    Args:
        most: sockets that may be open. A further one takes the place of one that is idle, or is told so and closed.
    """

    def __init__(self, *args: Any, most: int, **named: Any):
        super().__init__(*args, **named)
        self._most = most
        self._refused = False
        self._head = _Timer()  # runs while a request's head is awaited or a refused body comes
        self._stalled = _Timer()  # runs while the system holds back what was sent

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=0)  # `pause_writing` as soon as anything is held back
        super().connection_made(transport)
        if len(self.connections) > self._most and not self._close_an_idle_one():
            self._refuse()
        else:
            self._head.start(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        if self._busy:
            self._head.stop()
        else:
            self._head.start(HEAD_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        held = self.transport.get_write_buffer_size()
        self._stalled.start(STALL_S + held / SLOWEST_BYTES_A_SECOND, self.transport.abort)

    def resume_writing(self) -> None:
        self._stalled.stop()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.stop()
        self._stalled.stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """To bytes that are no HTTP, in OpenAI's form; `msg` is uvicorn's."""
        if not (self._busy and self.cycle.response_started):
            self.transport.write(_answer(b"400 Bad Request", invalid(msg).body))
        self.transport.close()

    @property
    def _busy(self) -> bool:
        """A request has begun and is not answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _idle(self) -> bool:
        """Its last request is answered, and nothing of another has come."""
        return self.cycle is not None and self.cycle.response_complete and not self._head.runs

    def _close_an_idle_one(self) -> bool:
        for other in self.connections:
            if isinstance(other, BoundedConnection) and other._idle and not other.transport.is_closing():
                other.transport.abort()
                return True
        return False

    def _refuse(self) -> None:
        self._refused = True
        message = f"{self._most} connections are open already"
        error = unavailable(message, code="too_many_connections", retry_after_s=1)
        self.transport.write(_answer(b"503 Service Unavailable", error.body, b"Retry-After: 1\r\n"))
        self.transport.write_eof()
        self._head.start(_REFUSED_S, self.transport.abort)


class _Timer:
    """Calls something unless it is stopped in time."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Does nothing to a timer that runs already."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(seconds, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def _answer(status: bytes, body: Any, headers: bytes = b"") -> bytes:
    content = to_json(body).encode("ascii")
    return (
        b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n%s"
        % (status, len(content), headers, content)
    )
