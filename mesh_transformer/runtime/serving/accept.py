"""Accepts clients while files are free, and closes the sockets that are worth least when there are too many."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from mesh_transformer.runtime.serving.access import BoundedConnection, closing_answer
from mesh_transformer.runtime.serving.responses import unavailable
from mesh_transformer.runtime.serving.socket_counts import CountedState

# connections in addition to one for each sequence that runs or waits
SPARE_CONNECTIONS = 256
# files of this process that connections must leave free
SPARE_FILES = 64
# the kernel's queue of sockets that are not accepted yet
BACKLOG = 128
# a pause of accepting
_PAUSE_S = 0.05
# time for a client to read the refusal of its connection
_REFUSED_S = 1.0


def raise_file_limit() -> None:
    """Allow this process as many open files as the system lets it allow itself."""
    # Windows has neither the module nor the limit; macOS refuses a limit above that of its kernel
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def free_files() -> float:
    """How many files this process can open; infinite where the system has no limit."""
    with contextlib.suppress(ImportError, FileNotFoundError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY:
            return limit - len(os.listdir("/dev/fd"))
    return float("inf")


class Server(uvicorn.Server):
    """A server on bound sockets, which accepts one client at a time: asyncio's own server accepts many before the first
    of them can be counted.

    Args:
        most: the largest number of open connections. A further one replaces the oldest that has sent nothing, else one
            whose last request is answered. Where all are busy, it gets a 503 answer and is closed.
    """

    def __init__(self, config: uvicorn.Config, most: int):
        super().__init__(config)
        self.server_state: CountedState = CountedState()
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in sockets or []:
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._start(self._accept(listener))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self.server_state.counts.report()
        await super().shutdown(sockets)

    def cut_off(self) -> int:
        """Close all connections. Returns their number."""
        connections = self._connections()
        for connection in connections:
            connection.transport.abort()
        return len(connections)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Disable uvicorn's signal handlers: while the server drains, the port stays open, and the exit code is 0."""
        yield

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while free_files() < SPARE_FILES:
                # its file is closed in a later turn of the loop
                replaced = self._close_one()
                await asyncio.sleep(0 if replaced else _PAUSE_S)
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                # the client has left, or another thread has taken the files
                self.server_state.counts.add(f"not accepted ({error.strerror})", "unknown addresses")
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self.server_state.connections) >= self._most and not self._close_one():
                self.server_state.counts.add("refused", address[0])
                self._start(self._refuse(client))
                continue
            with contextlib.suppress(OSError):
                await loop.connect_accepted_socket(self._connection, client)

    def _connection(self) -> BoundedConnection:
        state = self.server_state
        return BoundedConnection(config=self.config, server_state=state, app_state=self.lifespan.state)

    def _connections(self) -> list[BoundedConnection]:
        return [each for each in self.server_state.connections if isinstance(each, BoundedConnection)]

    def _close_one(self) -> bool:
        """Close the connection that is worth least. Whether there was one that is not busy."""
        open_ones = [each for each in self._connections() if not each.transport.is_closing()]
        silent = [each for each in open_ones if each.silent]
        idle = [each for each in open_ones if each.idle]
        for candidates in (silent, idle):
            if candidates:
                oldest = min(candidates, key=lambda connection: connection.opened_at)
                if oldest.silent:
                    self.server_state.counts.add("closed that had sent nothing, for others", oldest.client_address)
                oldest.transport.abort()
                return True
        return False

    async def _refuse(self, client: socket.socket) -> None:
        """Tell a client that all connections are busy, and read what it sends: a socket that is closed with unread data
        is reset, and the client may lose the answer."""
        loop = asyncio.get_running_loop()
        message = f"the server has {self._most} open connections, its limit: retry later"
        error = unavailable(message, code="too_many_connections", retry_after_s=1)
        with client, contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_REFUSED_S):
                answer = closing_answer(b"503 Service Unavailable", error.body, b"Retry-After: 1\r\n")
                await loop.sock_sendall(client, answer)
                client.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(client, 1 << 12):
                    pass

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
