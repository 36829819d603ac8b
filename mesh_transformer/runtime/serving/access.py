"""Access to the server, before any route.

`BoundedConnection` limits the time that a socket may idle; accept.py limits their number. `AccessMiddleware` checks the
API key and the size and time of a body, and handles CORS and HEAD.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh_transformer.runtime.serving.cors import Cors
from mesh_transformer.runtime.serving.hosts import HostNames
from mesh_transformer.runtime.serving.keys import ApiKeys
from mesh_transformer.runtime.serving.responses import ApiError, ClientGone, invalid, to_json, unavailable
from mesh_transformer.runtime.serving.socket_counts import CountedState

# time for the head of a request, from the opening of the socket or from the first byte after the previous response
HEAD_S = 15.0
# time for a client to read the data in the send buffer, in addition to the time at the slowest allowed rate
STALL_S = 30.0
SLOWEST_BYTES_A_SECOND = 16 << 10
MAX_BODY_BYTES = 4 << 20
# limits for the bodies of requests without a response: of all clients, and of one client
MAX_BODIES_BYTES, MAX_CLIENT_BODIES_BYTES = 64 << 20, 16 << 20
# this part of each body does not count towards the limits, so that a short request always fits
SMALL_BODY_BYTES = 4 << 10
# time for a body to arrive
MAX_BODY_S = 60.0
# paths that need no key, and the start of such paths
OPEN_PATHS, OPEN_PREFIX = frozenset({"/", "/health", "/live", "/version", "/openapi.json"}), "/page/"


# of a scope: the key of its request, or, without keys, the address
_CLIENT = "mesh_transformer.client"


def client_of(request: Request) -> Hashable:
    """Whose request it is: who has its key, or, without keys, its address."""
    return request.scope.get(_CLIENT)


class AccessMiddleware:
    """An ASGI middleware.

    Args:
        keys: the API keys. A request needs one of them in the header `Authorization: Bearer KEY`, if there are any.
        cors: which web pages may read the answers of the APIs and of /health.
        names: by which the server may be asked.
        timeout_s: the time limit of a request in seconds. A body must arrive within this time and within MAX_BODY_S.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, cors: Cors, names: HostNames, timeout_s: float):
        self._app, self._keys, self._cors, self._names = app, keys, cors, names
        self._body_s = min(timeout_s, MAX_BODY_S)
        # counted bytes of all bodies, by client
        self._body_bytes: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _for_pages(scope["path"]):
            send = self._cors.wrap(scope, send)
        # uvicorn omits the body of a response to HEAD
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        usage, refusal = _BodyUsage((scope["client"] or ("",))[0]), None
        try:
            await self._answer(scope, receive, send, usage)
        except ApiError as error:
            refusal = error.response()
        finally:
            self._body_bytes[usage.client] -= usage.bytes
            # removes clients with zero bytes
            self._body_bytes += Counter()
        if refusal is not None:
            await _refuse(refusal, usage, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, usage: _BodyUsage) -> None:
        headers = Headers(scope=scope)
        self._names.check(headers)
        _check_framing(headers, scope["http_version"])
        if scope["method"] == "OPTIONS" and _for_pages(scope["path"]):
            await Response(status_code=204)(scope, receive, send)
            return
        if scope["path"] not in OPEN_PATHS and not scope["path"].startswith(OPEN_PREFIX):
            self._check_key(*_key_of(headers))
        scope[_CLIENT] = _key_of(headers)[1] if self._keys.required else usage.client
        _check_encoding(headers.get("content-encoding", "identity"))
        _check_size(int(headers.get("content-length", "0")))
        try:
            async with asyncio.timeout(self._body_s):
                body = await self._read(receive, usage)
        except TimeoutError as error:
            message = f"the body did not arrive within {self._body_s:g} seconds"
            raise ApiError(408, message, code="timeout") from error
        await self._app(scope, _replay(body, receive), send)

    def _check_key(self, scheme: str, key: str) -> None:
        """Raise ApiError 401 for a wrong key."""
        accepted = not self._keys.required or self._keys.accepts(key.encode("latin-1"))
        if not accepted or (self._keys.required and scheme.lower() != "bearer"):
            message = "this server needs an API key: send it in the header Authorization: Bearer KEY"
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    async def _read(self, receive: Receive, usage: _BodyUsage) -> bytes:
        """The whole body. The limit of MAX_BODY_BYTES holds for a chunked body too.

        Raises:
            ApiError: 413, the body is too large; 503, the bodies of all clients, or of this client, are too large.
            ClientGone: the client closed its connection before the end of the body.
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
            if self._body_bytes[usage.client] > MAX_CLIENT_BODIES_BYTES or self._body_bytes.total() > MAX_BODIES_BYTES:
                raise unavailable("too many large requests at a time: retry later", code="queue_full", retry_after_s=1)
            if not usage.unread:
                return bytes(body)


class _BodyUsage:
    """The body of one request: its bytes in `AccessMiddleware._body_bytes`, and whether a part of it is unread.

    Args:
        client: the address of the client.
    """

    def __init__(self, client: str) -> None:
        self.client = client
        self.bytes = 0
        self.unread = True


def _key_of(headers: Headers) -> tuple[str, str]:
    """The scheme and the key of a request's header Authorization."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return scheme, key.strip()


async def _refuse(response: Response, usage: _BodyUsage, receive: Receive, send: Send) -> None:
    """Send an error response before the body has arrived, then read the rest of the body.

    A socket that is closed with unread data is reset, and the client may lose the response.
    """
    start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAD_S):
            while usage.unread:
                usage.unread = (await receive()).get("more_body", False)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _check_framing(headers: Headers, version: str) -> None:
    """Raise ApiError 400 for another version of HTTP, whose preface looks like a request (RFC 9113, 3.4), and for a
    body with two lengths: a proxy may use the other one (RFC 9112, 6.1)."""
    if version not in ("1.0", "1.1"):
        raise ApiError(400, f"this server does not speak HTTP/{version}: use 1.1", headers={"Connection": "close"})
    if "transfer-encoding" in headers and "content-length" in headers:
        message = "the request has both Transfer-Encoding and Content-Length: send only one of them"
        raise ApiError(400, message, headers={"Connection": "close"})


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes, the limit of this server")


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(415, f"Content-Encoding {encoding[:40]!r}: send the body uncompressed")


def _for_pages(path: str) -> bool:
    """Whether a path is for pages of other origins: the APIs and /health."""
    return path in ("/complete", "/tokenize", "/detokenize", "/health") or path.startswith("/v1/")


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that first returns the body, in one message, and then the messages that follow it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return pending.pop() if pending else await receive()

    return next_message


class BoundedConnection(H11Protocol):
    """A client's socket. It is closed when a time limit passes, which cancels its request.

    Attributes:
        opened_at: when it was opened, by the loop's clock.
        silent: whether no byte has arrived on it.
    """

    server_state: CountedState

    def __init__(self, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.opened_at = asyncio.get_running_loop().time()
        self.silent = True
        # runs while the server waits for the head of a request
        self._head = _Timer()
        # runs while the send buffer is full
        self._stalled = _Timer()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # asyncio does this only for sockets of `proto` IPPROTO_TCP. Without it the body of an answer waits until the
        # client acknowledges the head, which takes 40 ms on a kept connection.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # call `pause_writing` as soon as data is buffered
        transport.set_write_buffer_limits(high=0)
        super().connection_made(transport)
        self._head.start(HEAD_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        self.silent = False
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
        """Answer bytes that are not HTTP with OpenAI's error object. `msg` is uvicorn's message."""
        self.server_state.counts.add("with bytes that are not HTTP", self.client_address)
        if not (self._busy and self.cycle.response_started):
            self.transport.write(closing_answer(b"400 Bad Request", invalid(msg).body))
        self.transport.close()

    @property
    def _busy(self) -> bool:
        """Whether a request has started and its response is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def idle(self) -> bool:
        """Whether the last response is complete and no byte of another request has arrived."""
        return self.cycle is not None and self.cycle.response_complete and not self._head.runs

    @property
    def client_address(self) -> str:
        """The address of the client, without its port."""
        return self.client[0] if self.client else ""


class _Timer:
    """Calls a function after a delay, unless it is stopped before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, call: Callable[[], None]) -> None:
        """Start the timer if it does not run."""
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(seconds, call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def closing_answer(status: bytes, body: Any, headers: bytes = b"") -> bytes:
    """The bytes of an answer with an error object, after which the connection is closed."""
    content = to_json(body).encode("ascii")
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n%s\r\n%s" % (
        status,
        len(content),
        headers,
        content,
    )
