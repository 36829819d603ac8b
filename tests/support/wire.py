"""HTTP requests over a plain socket, for input that no client library sends."""

import contextlib
import json
import socket
import time
from typing import Any

from support.waiting import LONG_S


def ask(*, head_lines: str = "", **fields: Any) -> bytes:
    """The bytes of a completion request."""
    body = json.dumps({"prompt": "a", "max_tokens": 60, "ignore_eos": True, **fields}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n"
    )
    return f"{head}{head_lines}\r\n".encode() + body


def connect(url: str, receive_buffer: int | None = None) -> socket.socket:
    """A socket connected to a server. With a small receive buffer, the server's send buffer fills soon."""
    client = socket.socket()
    client.settimeout(LONG_S)
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    return client


def read_to_end(client: socket.socket) -> bytes:
    """All bytes until the server closes or resets the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(65536):
            received += part
    return received


def send_slowly(client: socket.socket, content: bytes, pause_s: float) -> bool:
    """Send one byte at a time, until all are sent or the server closes the connection. Returns whether all were
    sent."""
    for byte in content:
        try:
            client.sendall(bytes([byte]))
        except OSError:
            return False
        time.sleep(pause_s)
    return True


def receive(client: socket.socket, end: bytes) -> bytes:
    """The received bytes up to `end`, including `end`."""
    received = b""
    while end not in received:
        part = client.recv(65536)
        assert part, received
        received += part
    return received


def body_of(received: bytes) -> Any:
    """The JSON in the body of a complete response."""
    return json.loads(received.partition(b"\r\n\r\n")[2])
