"""Names of the server. A page of a site whose name leads to this machine (DNS rebinding) is of the server's own origin
for a browser, but its requests have the name of that site."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.datastructures import Headers

from mesh_transformer.config.describe import short
from mesh_transformer.errors import UserError
from mesh_transformer.runtime.serving.responses import ApiError

EVERY = "*"
# `localhost` and the names below it never leave the machine (RFC 6761, 6.3)
THIS_MACHINE = r"(?:[a-z0-9_-]+\.)*localhost|127\.0\.0\.1|\[::1\]"
_NAME = r"\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*"
_HOST = re.compile(rf"({_NAME})\.?(?::[0-9]{{0,5}})?", re.IGNORECASE)
_ORIGIN = re.compile(rf"https?://({_NAME})(?::[0-9]{{1,5}})?")


class HostNames:
    """The names by which the server is asked.

    Args:
        names: names and addresses, without ports, besides those of this machine. None: every name.
    """

    def __init__(self, names: Sequence[str] | None):
        self._names = None if names is None else frozenset(map(_normal, names))

    def check(self, headers: Headers) -> None:
        """Raise ApiError 403 for a request to another name. HTTP/1.0 has requests without one."""
        host = headers.get("host")
        if self._names is None or host is None:
            return
        match = _HOST.fullmatch(host.strip())
        if match is None or not self._has(_normal(match[1])):
            name = match[1] if match else host
            raise ApiError(
                403,
                f"this server is not asked by the name {short(name)}: use localhost, or start it with --allow-host "
                f"{name if match else 'NAME'}",
                code="host_not_allowed",
            )

    def is_own(self, origin: str) -> bool:
        """Whether a page of this origin was loaded by a name that was given."""
        match = _ORIGIN.fullmatch(origin)
        return self._names is not None and match is not None and _normal(match[1]) in self._names

    def _has(self, name: str) -> bool:
        return self._names is None or name in self._names or re.fullmatch(THIS_MACHINE, name) is not None


def check_host(name: str) -> None:
    """Raise UserError unless `name` is "*", or a name or an address without a port."""
    if name != EVERY and not re.fullmatch(_NAME, _normal(name)):
        raise UserError(
            f"--allow-host {name!r}: must be a name or an address without a scheme and a port, such as example.org or "
            "10.0.0.5; or *"
        )


def _normal(name: str) -> str:
    """A name in small letters; an IPv6 address in brackets."""
    name = name.lower()
    return f"[{name}]" if ":" in name and not name.startswith("[") else name
