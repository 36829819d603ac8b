"""A worker process: runs one job in its main thread and tells its agent about it.

Its first message is the job, {"name", "config", "arguments", "run", "worker_id"}. What it tells, besides {"kind": "alive",
"at_work"} every second: {"kind": "begun", ...}, {"kind": "phase", "name", "step"}, {"kind": "metrics", "step", "scalars"}, what
`stream.StreamedFeed` tells, and at last {"kind": "result", "value"} or {"kind": "error", "category", "message",
"traceback"}. What it is told: {"kind": "batch", ...} and {"kind": "leave"}.

When its agent dies it saves and ends, as after a SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import numpy as np

from mesh_transformer import logs
from mesh_transformer.cluster import host_lock
from mesh_transformer.cluster.channel import Channel
from mesh_transformer.cluster.failures import category
from mesh_transformer.cluster.stream import StreamedFeed
from mesh_transformer.errors import RunError, UserError
from mesh_transformer.logs import Scalars
from mesh_transformer.runtime.observer import Observer
from mesh_transformer.signs import Watch

ALIVE_EVERY_S = 1.0
ORPHAN_S = 60.0  # for saving, once nobody is there to tell
FAILED = {"user": 2, "run": 1, "bug": 1, "machine": 1}  # exit codes


def main() -> None:
    """Run the job that comes through the inherited socket whose number is the first argument."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # until the run saves first
    logs.set_up()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    first = channel.receive()
    if first is None:
        sys.exit(1)
    worker = Worker(channel, first[0])
    sys.exit(worker.run())


class Worker(Observer):
    """The job of this process, and what it tells the agent."""

    shows_progress = True

    def __init__(self, channel: Channel, job: dict[str, Any]):
        self._channel, self._job = channel, job
        self._feed: StreamedFeed | None = None
        self._leaving = False

    def run(self) -> int:
        """Do the job. Returns its exit code; does not return if it failed, for the other processes may hang."""
        for target in (self._listen, self._stay_alive):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()
        try:
            self._lock = host_lock.hold(self._job["run"], self._job["worker_id"])
            return self._do()
        except Exception as error:  # noqa: BLE001  (told to the agent, whatever it is)
            self._fail(error)

    def _do(self) -> int:
        from mesh_transformer.cluster import jobs

        job = self._job
        around = jobs.Around(self, self._open_feed)
        outcome = jobs.run(job["name"], job["config"], job["arguments"], around)
        self._tell({"kind": "result", "value": outcome.result})
        self.phase("leave", 0)
        return outcome.code

    def _open_feed(self, session: Any) -> Any:
        if session.config.data.read_by == "host":
            from mesh_transformer.runtime.feeds import open_train_feed

            return open_train_feed(session)
        self._feed = StreamedFeed(self._tell, session.rows(session.microbatch), session.microbatch)
        if self._leaving:
            self._feed.leave()
        return self._feed

    def begun(self, step: int, total: int, steps_redone: int) -> None:
        import jax

        places = {(d.process_index, *getattr(d, "coords", (d.id,))) for d in jax.devices()}
        self._tell(
            {
                "kind": "begun",
                "step": step,
                "total": total,
                "steps_redone": steps_redone,
                "chips": len(places),
            }
        )

    def phase(self, name: str, step: int) -> None:
        self._tell({"kind": "phase", "name": name, "step": step})

    def metrics(self, step: int, scalars: Scalars) -> None:
        self._tell({"kind": "metrics", "step": step, "scalars": dict(scalars)})

    def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # `_listen` notices too, and ends the run
            self._channel.send(event)

    def _listen(self) -> None:
        while (message := self._channel.receive()) is not None:
            header, payload = message
            if header["kind"] == "leave":
                self._leave()
            elif self._feed is not None:
                batch = np.frombuffer(payload, np.int32).reshape(header["shape"])
                self._feed.put(header["number"], batch, header["state"], header["held"])
        logs.log.warning("the agent of this worker is gone: saving, then ending")
        self._leave()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_S)
        os._exit(1)

    def _leave(self) -> None:
        self._leaving = True
        if self._feed is not None:
            self._feed.leave()

    def _stay_alive(self) -> None:
        watch = Watch()
        while True:
            self._tell({"kind": "alive", "at_work": watch.at_work()})
            time.sleep(ALIVE_EVERY_S)

    def _fail(self, error: Exception) -> NoReturn:
        types = [kind.__name__ for kind in type(error).__mro__]
        whose = category(types, str(error))
        expected = isinstance(error, UserError | RunError)
        message = str(error) if expected else f"{type(error).__name__}: {str(error)[:2000]}"
        told = {"category": whose, "message": message, "traceback": traceback.format_exc()}
        if (
            whose == "machine" and not expected
        ):  # perhaps only the end of another worker: the driver shows errors, not this
            for line in told["traceback"].splitlines():
                logs.log.info("%s", line)
        logs.log.error("%s", told["traceback"] if whose == "bug" else message)
        self._tell({"kind": "error", **told})
        sys.stderr.flush()
        os._exit(FAILED[whose])  # jax's own end would wait for processes that do not come


if __name__ == "__main__":
    main()
