"""Messages between an agent and its worker process: a JSON object and perhaps some bytes, over a socket pair."""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

_HEADER = struct.Struct("!IQ")  # bytes of the JSON, bytes behind it


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket):
        self._socket, self._lock = end, threading.Lock()

    def send(self, message: dict[str, Any], payload: bytes | memoryview = b"") -> None:
        """Send one message.

        Raises:
            OSError: the other end is gone.
        """
        text = json.dumps(message).encode()
        with self._lock:
            self._socket.sendall(_HEADER.pack(len(text), len(payload)) + text)
            self._socket.sendall(payload)

    def receive(self) -> tuple[dict[str, Any], bytearray] | None:
        """The next message; None when the other end is gone."""
        try:
            length, extra = _HEADER.unpack(self._read(_HEADER.size))
            return json.loads(self._read(length)), self._read(extra)
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view = memoryview(content)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]
        return content
