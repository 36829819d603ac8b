"""Sockets that were refused or closed, in few log lines: a client may open thousands of them."""

import asyncio
from collections import Counter

from uvicorn.server import ServerState

from mesh_transformer.logs import log

_EVERY_S = 60.0


class SocketCounts:
    """Counts sockets by what was wrong with them, and logs a line a minute for each kind."""

    def __init__(self) -> None:
        self._addresses: dict[str, Counter[str]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, what: str, address: str) -> None:
        """Count a socket.

        Args:
            what: what was wrong, such as "refused".
            address: of the client.
        """
        self._addresses.setdefault(what, Counter())[address] += 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_EVERY_S, self.report)

    def report(self) -> None:
        """Log what was counted since the last report."""
        for what, addresses in self._addresses.items():
            ((address, count),) = addresses.most_common(1)
            log.warning("sockets %s: %d, %d of them from %s", what, addresses.total(), count, address)
        self._addresses.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class CountedState(ServerState):
    """The state that uvicorn's server shares with its connections, with counts."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = SocketCounts()
