"""The state of the slice under a cluster, asked for in a thread: the cloud may take its time to answer."""

from __future__ import annotations

import threading

from mesh_transformer.cluster.base import Hosts
from mesh_transformer.logs import log

EVERY_S = 10.0


class SliceState:
    """Knows the newest answer."""

    def __init__(self, hosts: Hosts, every_s: float = EVERY_S):
        self._hosts, self._every_s = hosts, every_s
        self.value: str | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="slice-state", daemon=True)
        self._thread.start()

    def refresh(self) -> str | None:
        """Ask now."""
        try:
            self.value = self._hosts.state()
        except Exception as error:  # noqa: BLE001  (not to know is no reason to end a run)
            log.warning("the state of the slice is unknown: %s", error)
            self.value = None
        return self.value

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._every_s):
            self.refresh()
