"""CORS: which web pages may read the answers of the server. A browser hides an answer without the headers from a page
of another origin."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope, Send

from mesh_transformer.errors import UserError
from mesh_transformer.runtime.serving.hosts import THIS_MACHINE, HostNames

_HEADERS = {
    # the asterisk does not include Authorization
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Allow-Methods": "*",
    "Access-Control-Expose-Headers": "Retry-After, X-Request-Id",
    "Access-Control-Max-Age": "7200",
}
_EVERY = "*"
# as browsers serialize an origin (RFC 6454, 6.2)
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)(?::([1-9][0-9]{0,4}))?")
_DEFAULT_PORTS = {("http", "80"), ("https", "443")}
_THIS_MACHINE = re.compile(rf"https?://({THIS_MACHINE})(?::[1-9][0-9]{{0,4}})?")


class Cors:
    """Adds the headers of CORS to answers.

    Args:
        allowed: the origins whose pages may read the answers, besides pages of this machine and of the server itself.
            "*": all origins.
        names: a page that was loaded by one of them is of the server itself.
    """

    def __init__(self, allowed: Sequence[str], names: HostNames):
        self._allowed, self._names = frozenset(allowed), names

    def wrap(self, scope: Scope, send: Send) -> Send:
        """A `send` that adds the headers for the origin of a request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._add(MutableHeaders(scope=message), scope)
            await send(message)

        return send_with_headers

    def _add(self, headers: MutableHeaders, scope: Scope) -> None:
        if _EVERY in self._allowed:
            headers.update({"Access-Control-Allow-Origin": _EVERY, **_HEADERS})
            return
        # a cache must not give the answer for one origin to another
        headers.add_vary_header("Origin")
        request = Headers(scope=scope)
        origins = request.getlist("origin")
        server_origin = f"{scope['scheme']}://{request.get('host', '')}"
        if len(origins) != 1:
            return
        own = origins[0] == server_origin or self._names.is_own(origins[0])
        if own or origins[0] in self._allowed or _THIS_MACHINE.fullmatch(origins[0]):
            headers.update({"Access-Control-Allow-Origin": origins[0], **_HEADERS})


def check_origin(origin: str) -> None:
    """Raise UserError unless `origin` is "*", "null", or has the form of a browser's header Origin."""
    parts = _ORIGIN.fullmatch(origin)
    if origin in (_EVERY, "null") or (parts and _is_host(parts[2]) and _is_port(parts[1], parts[3])):
        return
    raise UserError(
        f"--allow-origin {origin!r}: must be an origin as a browser sends it, such as https://example.org or "
        "http://10.0.0.5:3000, in lower case, without a path, a slash at the end or the default port; or null; or *"
    )


def _is_host(host: str) -> bool:
    """Whether a host that looks like an IP address is one."""
    try:
        if host.startswith("["):
            ipaddress.IPv6Address(host[1:-1])
        elif host.rpartition(".")[2].isdecimal():
            ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


def _is_port(scheme: str, port: str | None) -> bool:
    return port is None or (int(port) < 1 << 16 and (scheme, port) not in _DEFAULT_PORTS)
