"""An agent's hold on its worker process: starts it, listens to it, kills it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_transformer.cluster import host
from mesh_transformer.cluster.base import Event, Job, Status, Variables
from mesh_transformer.cluster.stream import DEPTH, may_take

CODE = Path(__file__).resolve().parents[2]  # the folder in which the package lies
TAIL_BYTES = 8192
ROOM_WAIT_S = 1.0
FADING = 0.99  # of the slowest step with each one after it: a single slow one is forgotten after some hundred
EVENTS_KEPT = 100_000  # of a worker whose driver is gone


class WorkerProcess:
    """One worker process, from its start to its end.

    Args:
        environment: variables on top of this process's; None removes one.
        log: where its output goes, open for appending and reading.
    """

    def __init__(self, job: Job, run: str, worker_id: int, environment: Variables, log: BinaryIO):
        self._log = log
        self._events: list[Event] = []
        self._forgotten = 0  # events that the driver has had
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._taken, self._given, self._wants_data = 0, 0, False
        self._beat = self._alive = self._sign = self._phase_began = time.monotonic()
        self._pipe, theirs = multiprocessing.Pipe()
        name = host.worker_name(run, worker_id)  # by which `host` knows it
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mesh_transformer.cluster.worker", str(theirs.fileno()), name],
                cwd=job.folder if os.path.isdir(job.folder) else CODE,
                env=_environment(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the driver's terminal is the driver's
            )
        process = host.identify(self._process.pid)
        self._known = Status(worker_id, "running", process=process, job_key=job.key)
        self._send((job, run, worker_id))
        self._thread = threading.Thread(target=self._listen, name=f"worker-{worker_id}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended, or not told all yet."""
        return self._thread.is_alive()

    def status(self) -> Status:
        """What its host knows of it."""
        running, now = self.running, time.monotonic()
        with self._changed:
            if self._known.phase == "data" and self._wants_data and not may_take(self._given, self._taken):
                self._sign = now
            beat_age_s, idle_s, alive_age_s = now - self._beat, now - self._sign, now - self._alive
            found = replace(self._known, beat_age_s=beat_age_s, idle_s=idle_s, alive_age_s=alive_age_s)
        if running:
            return found
        tail = read_log(self._log, -TAIL_BYTES, TAIL_BYTES).decode(errors="replace")
        return replace(found, state="ended", exit_code=self._process.returncode, tail=tail)

    def events(self, after: int) -> tuple[int, list[Event]]:
        """The events behind the first `after`, which are forgotten, and the count of all."""
        with self._changed:
            drop = min(max(0, after - self._forgotten), len(self._events))
            del self._events[:drop]
            self._forgotten += drop
            return self._forgotten + len(self._events), list(self._events)

    def feed(self, number: int, rows: np.ndarray, state: Any, held: int) -> bool:
        """Pass a batch on, if there is or comes room for it within a second; one that was passed on is dropped."""
        with self._changed:
            if number < self._given:
                return True
            self._changed.wait_for(self._has_room, ROOM_WAIT_S)
            if number != self._given or not self._has_room():
                return False
            self._given += 1
        return self._send((number, np.asarray(rows, np.int32), state, held))

    def stop(self) -> None:
        """SIGTERM: save and end."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            self._send("leave")

    def kill(self, wait_s: float = 10.0) -> None:
        """SIGKILL, which a stopped process obeys too; returns when it is gone."""
        if self._process.poll() is None:
            self._process.kill()
        self._thread.join(wait_s)

    def _send(self, message: Any) -> bool:
        try:
            with self._sending:
                self._pipe.send(message)
            return True
        except OSError:
            return False  # it has ended: `status` tells

    def _has_room(self) -> bool:
        return self._wants_data and self._given - self._taken < DEPTH

    def _listen(self) -> None:
        try:
            while True:
                event = self._pipe.recv()
                with self._changed:
                    self._note(event)
                    self._changed.notify_all()
        except (EOFError, OSError):
            self._process.wait()
            with self._sending:
                self._pipe.close()

    def _note(self, event: Event) -> None:
        now, kind, known = time.monotonic(), event["kind"], self._known
        self._alive = now
        if kind == "alive":
            self._sign = now if event["at_work"] else self._sign
            return
        self._beat = self._sign = now
        if kind == "phase":
            phase, step, slowest_step_s = event["name"], event["step"] or known.step, known.slowest_step_s
            if known.phase == "step":
                slowest_step_s = max(FADING * slowest_step_s, now - self._phase_began)
            self._known = replace(known, phase=phase, step=step, slowest_step_s=slowest_step_s)
            self._phase_began = now
        elif kind == "taken":
            self._taken = event["count"]
        elif kind in ("begun", "error"):
            self._known = replace(known, **{kind: event[kind]})
        elif len(self._events) < EVENTS_KEPT:
            self._wants_data |= kind == "feed"
            self._events.append(event)


def read_log(log: BinaryIO, offset: int, size: int) -> bytes:
    """Up to `size` bytes of an open file from `offset`, from its end if that is negative."""
    end = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, offset if offset >= 0 else max(0, end + offset))


def _environment(changes: Variables) -> dict[str, str]:
    """This process's variables with changes, and the package first on the path."""
    merged = {**os.environ, "PYTHONUNBUFFERED": "1", **changes}
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CODE), merged.get("PYTHONPATH")]))
    return {name: value for name, value in merged.items() if value is not None}
