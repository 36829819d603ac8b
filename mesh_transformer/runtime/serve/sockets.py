"""How long and how often a client may keep a socket: uvicorn's protocol, with the limits that it leaves out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from mesh_transformer.runtime.serve.errors import invalid, to_json, unavailable

HEAD_S = (
    15.0  # for a request's head to come, from when the socket is open or a byte follows the answer before
)
STALL_S = 30.0  # for what was sent to be taken, besides its bytes at the slowest rate
SLOWEST_BYTES_A_SECOND = 16 << 10
_REFUSED_S = 1.0  # for the words of a refusal to arrive


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
        error = unavailable(
            f"{self._most} connections are open already", code="too_many_connections", retry_after_s=1
        )
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
