"""The agent of a run on one host: starts its worker process, answers the driver, and looks after both.

An agent never computes and never imports jax: whatever happens to the worker, its methods answer at once. It outlives the
driver: when none has asked for a while, it lets the worker save and end, and waits for the next driver.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_transformer.cluster.base import Event, Job, Process, Status, Variables
from mesh_transformer.cluster.host import processes as host
from mesh_transformer.cluster.host.stream import DEPTH, may_take

DRIVER_GONE_S = 5.0  # after which another driver may take over
LINES_BYTES = 65536  # of the worker's output, at most, in one answer
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
                [sys.executable, "-m", "mesh_transformer.cluster.host.worker", str(theirs.fileno()), name],
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


class TakenOver(RuntimeError):
    """A call from a driver that is not the agent's any more."""


class Agent:
    """All methods may be called from any thread, and return within about a second.

    Args:
        worker_id: the number of this host, and of its process in the mesh.
        run: name of the run.
        address: of this host, for the other ones.
        ends_process: whether its process ends when no driver has come for as long as the last job says.

    Raises:
        UserError: the folder for the worker's output is not safe.
    """

    def __init__(self, worker_id: int, run: str, address: str = "127.0.0.1", ends_process: bool = True):
        self._id, self._run, self._address = worker_id, run, address
        self._ends_process = ends_process
        self._worker: WorkerProcess | None = None
        self._driver, self._asked = "", time.monotonic()
        # until a job brings its own
        self._settings: dict[str, Any] = {"driver_timeout": 20.0, "driver_wait": 3600.0}
        self._lock = threading.Lock()
        name = f"{host.worker_name(run, worker_id)}.log"
        self._log = os.fdopen(host.open_file(name, os.O_RDWR | os.O_APPEND), "rb+", buffering=0)
        self._closed = threading.Event()
        threading.Thread(target=self._watch_driver, name="watch-driver", daemon=True).start()

    def attach(self, driver: str) -> bool:
        """Obey this driver from now on; false if another one has asked lately."""
        with self._lock:
            if self._driver not in ("", driver) and time.monotonic() - self._asked < DRIVER_GONE_S:
                return False
            self._driver, self._asked = driver, time.monotonic()
            return True

    def coordinator(self, driver: str) -> str:
        """host:port where process 0 can listen."""
        self._worker_of(driver)
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return f"{self._address}:{probe.getsockname()[1]}"

    def start(self, driver: str, job: Job, environment: Variables) -> int:
        """Run a job in a new process, after the end of the one before. Returns the size of the log before it."""
        self._worker_of(driver)
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
            self._settings = job.config["cluster"]
            size = os.fstat(self._log.fileno()).st_size
            self._worker = WorkerProcess(job, self._run, self._id, environment, self._log)
            return size

    def status(self, driver: str, events_after: int, log_offset: int) -> dict[str, Any]:
        """What is known of the worker, with the events and the output behind what the driver has had."""
        worker = self._worker_of(driver)
        if worker is None:
            return {"status": Status(self._id), "count": 0, "events": [], "offset": log_offset, "lines": []}
        found = worker.status()
        count, events = worker.events(events_after)
        offset, lines = self._lines(log_offset)
        return {"status": found, "count": count, "events": events, "offset": offset, "lines": lines}

    def feed(self, driver: str, number: int, rows: np.ndarray, state: Any, held: int) -> bool:
        """A batch for the worker; false if it has no room for it yet."""
        worker = self._worker_of(driver)
        return worker is not None and worker.feed(number, rows, state, held)

    def stop(self, driver: str) -> None:
        """Let the worker save and end."""
        if worker := self._worker_of(driver):
            worker.stop()

    def kill(self, driver: str) -> None:
        """End the worker at once."""
        self._worker_of(driver)
        with self._lock:
            if self._worker is not None:
                self._worker.kill()

    def close(self) -> None:
        """Stop watching. No other method may be called then."""
        self._closed.set()
        self._log.close()

    def process(self) -> Process | None:
        """The process of this agent."""
        return host.identify(os.getpid())

    def _worker_of(self, driver: str) -> WorkerProcess | None:
        """Raises TakenOver if the agent obeys another driver."""
        if driver != self._driver:
            raise TakenOver("another driver has taken this run over")
        self._asked = time.monotonic()
        return self._worker

    def _lines(self, offset: int) -> tuple[int, list[str]]:
        """The whole lines of the log from `offset`, and where they end."""
        content = read_log(self._log, offset, LINES_BYTES)
        whole = content.rpartition(b"\n")[0] + b"\n" if b"\n" in content else b""
        if not whole and len(content) == LINES_BYTES:  # one endless line
            whole = content
        return offset + len(whole), whole.decode(errors="replace").splitlines()

    def _watch_driver(self) -> None:
        told = False
        while not self._closed.wait(1.0):
            silent_s, worker = time.monotonic() - self._asked, self._worker
            if silent_s < self._settings["driver_timeout"]:
                told = False
            elif worker is not None and worker.running and not told:
                told = True
                worker.stop()
            if silent_s > self._settings["driver_wait"]:
                if worker is not None:
                    worker.kill()
                if self._ends_process:
                    os._exit(0)
                return
