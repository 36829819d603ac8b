"""What stands before every route: the API key, the size of a body and the time it may take, CORS for /complete."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mesh_transformer.runtime.serve.classic import PATH
from mesh_transformer.runtime.serve.connection import ClientGone
from mesh_transformer.runtime.serve.errors import ApiError

MAX_BODY_BYTES = 4 << 20
OPEN_PATHS = frozenset({"/", "/health", "/version", "/openapi.json"})  # need no key
_CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Headers": "*, Authorization",  # the asterisk does not cover that one
    "Access-Control-Allow-Methods": "*",
}


class Guard:
    """An ASGI application around another.

    Args:
        keys: a request needs one of them as `Authorization: Bearer KEY`; empty: none is needed.
        timeout_s: seconds for a body to arrive.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[bytes], timeout_s: float):
        self._app, self._keys, self._timeout_s = app, tuple(keys), timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] == PATH:
            send = _with_cors(send)
        preflight = scope["path"] == PATH and scope["method"] == "OPTIONS"
        try:
            if not (preflight or scope["path"] in OPEN_PATHS):
                self._check_key(Headers(scope=scope).get("authorization", ""))
            async with asyncio.timeout(self._timeout_s):
                body = await _read(receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
        except TimeoutError:
            late = ApiError(408, f"the body did not come within {self._timeout_s:g} seconds", code="timeout")
            await late.response()(scope, receive, send)
        except ClientGone:
            return
        else:
            await self._app(scope, _replay(body, receive), send)

    def _check_key(self, authorization: str) -> None:
        """Raises ApiError, 401. Every key is compared, each in constant time."""
        scheme, _, given = authorization.partition(" ")
        found = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        if self._keys and (scheme.lower() != "bearer" or not any(found)):
            raise ApiError(
                401,
                "this server needs an API key, as the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


async def _read(receive: Receive) -> bytes:
    """The whole body, at most MAX_BODY_BYTES however it is sent.

    Raises:
        ApiError: 413, it is larger.
        ClientGone: it never came to its end.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is over {MAX_BODY_BYTES} bytes, this server's limit")
        if not message.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body that was read, whole, and then what comes after it."""
    unread = True

    async def next_message() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return next_message


def _with_cors(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).update(_CORS)
        await send(message)

    return send_with_headers
