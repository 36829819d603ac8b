"""The agent of a run on one host. It starts the worker process, answers the driver, and watches both.

An agent never computes and never imports jax, so its methods answer at once, whatever happens to the worker. It
outlives the driver. Without contact from a driver it lets the worker save and end, and waits for the next driver.
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

from mesh_transformer.cluster.base import Event, Job, Process, Status, Variables
from mesh_transformer.cluster.host import processes
from mesh_transformer.cluster.host.stream import BUFFER_BATCHES, may_take
from mesh_transformer.sequences import Sequences

# after this time without contact from its driver an agent accepts another one
TAKEOVER_AFTER_S = 5.0
# limit for the output of the worker in one answer
LINES_BYTES = 65536
# the folder that contains the package
CODE = Path(__file__).resolve().parents[3]
TAIL_BYTES = 8192
# time in which the worker can take a batch and so make room for the next one
ROOM_WAIT_S = 1.0
# each step reduces the time of the slowest step, so that one slow step is forgotten after some hundred
SLOWEST_STEP_DECAY = 0.99
# limit for the events of a worker whose driver is gone
MAX_EVENTS = 100_000


class WorkerProcess:
    """One worker process, from its start to its end.

    Args:
        environment: changes to the environment of this process; None removes a variable.
        log: file for the output of the worker, open for appending and reading.
    """

    def __init__(self, job: Job, run: str, worker_id: int, environment: Variables, log: BinaryIO):
        self._log = log
        self._events: list[Event] = []
        # events that the driver has read
        self._dropped = 0
        self._changed, self._sending = threading.Condition(), threading.Lock()
        # batches that the worker has taken, and that were sent to it
        self._taken, self._sent, self._wants_data = 0, 0, False
        self._event_at = self._heartbeat_at = self._work_at = self._phase_began = time.monotonic()
        self._pipe, worker_end = multiprocessing.Pipe()
        # `processes` identifies the process by this argument
        name = processes.worker_name(run, worker_id)
        with worker_end:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "mesh_transformer.cluster.host.worker",
                    str(worker_end.fileno()),
                    name,
                ],
                cwd=job.folder if os.path.isdir(job.folder) else CODE,
                env=_environment(environment),
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the driver's terminal is for the driver alone
                start_new_session=True,
            )
        process = processes.identify(self._process.pid)
        self._status = Status(worker_id, "running", process=process, job_key=job.key)
        self._send((job, run, worker_id))
        self._thread = threading.Thread(target=self._listen, name=f"worker-{worker_id}", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the process runs, or some of its events have not been received."""
        return self._thread.is_alive()

    def status(self) -> Status:
        """The state of the worker."""
        running, now = self.running, time.monotonic()
        with self._changed:
            waits_for_driver = self._wants_data and not may_take(self._sent, self._taken)
            if self._status.phase == "data" and waits_for_driver:
                self._work_at = now
            status = replace(
                self._status,
                event_age_s=now - self._event_at,
                idle_s=now - self._work_at,
                heartbeat_age_s=now - self._heartbeat_at,
            )
        if running:
            return status
        tail = read_log(self._log, -TAIL_BYTES, TAIL_BYTES).decode(errors="replace")
        return replace(status, state="ended", exit_code=self._process.returncode, tail=tail)

    def events(self, after: int) -> tuple[int, list[Event]]:
        """The count of all events, and the events after the first `after`, which are dropped."""
        with self._changed:
            drop = min(max(0, after - self._dropped), len(self._events))
            del self._events[:drop]
            self._dropped += drop
            return self._dropped + len(self._events), list(self._events)

    def feed(self, number: int, rows: Sequences, state: Any, held_by_all: int) -> bool:
        """Send a batch to the worker. Returns False if there is no room for it within a second.

        A batch that was sent before is dropped.
        """
        with self._changed:
            if number < self._sent:
                return True
            self._changed.wait_for(self._has_room, ROOM_WAIT_S)
            if number != self._sent or not self._has_room():
                return False
            self._sent += 1
        return self._send((number, rows, state, held_by_all))

    def stop(self) -> None:
        """Send SIGTERM: the worker saves and ends."""
        if self.running:
            self._process.send_signal(signal.SIGTERM)
            self._send("drain")

    def kill(self, wait_s: float = 10.0) -> None:
        """Send SIGKILL, which also ends a stopped process. Returns when the process has ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._thread.join(wait_s)

    def _send(self, message: Any) -> bool:
        try:
            with self._sending:
                self._pipe.send(message)
            return True
        except OSError:
            # the process has ended; `status` shows it
            return False

    def _has_room(self) -> bool:
        return self._wants_data and self._sent - self._taken < BUFFER_BATCHES

    def _listen(self) -> None:
        try:
            while True:
                event = self._pipe.recv()
                with self._changed:
                    self._handle(event)
                    self._changed.notify_all()
        except (EOFError, OSError):
            self._process.wait()
            with self._sending:
                self._pipe.close()

    def _handle(self, event: Event) -> None:
        now, kind, status = time.monotonic(), event["kind"], self._status
        self._heartbeat_at = now
        if kind == "heartbeat":
            self._work_at = now if event["at_work"] else self._work_at
            return
        self._event_at = self._work_at = now
        if kind == "phase":
            phase, step, slowest_step_s = event["name"], event["step"] or status.step, status.slowest_step_s
            if status.phase == "step":
                slowest_step_s = max(SLOWEST_STEP_DECAY * slowest_step_s, now - self._phase_began)
            self._status = replace(status, phase=phase, step=step, slowest_step_s=slowest_step_s)
            self._phase_began = now
        elif kind == "taken":
            self._taken = event["count"]
        elif kind in ("start_point", "error"):
            self._status = replace(status, **{kind: event[kind]})
        elif len(self._events) < MAX_EVENTS:
            self._wants_data |= kind == "feed"
            self._events.append(event)


def read_log(log: BinaryIO, offset: int, size: int) -> bytes:
    """Up to `size` bytes of an open file from `offset`; a negative offset counts from the end."""
    end = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), size, offset if offset >= 0 else max(0, end + offset))


def _environment(changes: Variables) -> dict[str, str]:
    """The environment of this process with changes, and with the package first in PYTHONPATH."""
    merged = {**os.environ, "PYTHONUNBUFFERED": "1", **changes}
    merged["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CODE), merged.get("PYTHONPATH")]))
    return {name: value for name, value in merged.items() if value is not None}


class TakenOver(RuntimeError):
    """A call from a driver after another driver has taken over the agent."""


class Agent:
    """All methods may be called from any thread. They return within about a second.

    Args:
        worker_id: the number of this host, and of its process in the mesh.
        run: name of the run.
        address: address of this host for the other hosts.
        ends_process: whether the process of the agent ends when no driver comes within `driver_wait` of the last job.

    Raises:
        UserError: other users can access the folder for the worker's output.
    """

    def __init__(self, worker_id: int, run: str, address: str = "127.0.0.1", ends_process: bool = True):
        self._id, self._run, self._address = worker_id, run, address
        self._ends_process = ends_process
        self._worker: WorkerProcess | None = None
        self._driver, self._contact_at = "", time.monotonic()
        # for the time before the first job, which has its own settings
        self._settings: dict[str, Any] = {"driver_timeout": 20.0, "driver_wait": 3600.0}
        self._lock = threading.Lock()
        name = f"{processes.worker_name(run, worker_id)}.log"
        self._log = os.fdopen(processes.open_file(name, os.O_RDWR | os.O_APPEND), "rb+", buffering=0)
        self._closed = threading.Event()
        threading.Thread(target=self._watch_driver, name="watch-driver", daemon=True).start()

    def attach(self, driver: str) -> bool:
        """Accept this driver. Returns False if another driver has been in contact recently."""
        with self._lock:
            if self._driver not in ("", driver) and time.monotonic() - self._contact_at < TAKEOVER_AFTER_S:
                return False
            self._driver, self._contact_at = driver, time.monotonic()
            return True

    def coordinator(self, driver: str) -> str:
        """A free host:port at which process 0 can listen."""
        self._worker_for(driver)
        with socket.socket() as probe:
            probe.bind((self._address, 0))
            return f"{self._address}:{probe.getsockname()[1]}"

    def start(self, driver: str, job: Job, environment: Variables) -> int:
        """Run a job in a new process, after the end of the previous one. Returns the size of the log at its start."""
        self._worker_for(driver)
        with self._lock:
            if self._worker is not None:
                self._worker.kill()
            self._settings = job.config["cluster"]
            size = os.fstat(self._log.fileno()).st_size
            self._worker = WorkerProcess(job, self._run, self._id, environment, self._log)
            return size

    def status(self, driver: str, events_after: int, log_offset: int) -> dict[str, Any]:
        """The state of the worker, with the events and the output that the driver has not read."""
        worker = self._worker_for(driver)
        if worker is None:
            return {"status": Status(self._id), "count": 0, "events": [], "offset": log_offset, "lines": []}
        status = worker.status()
        count, events = worker.events(events_after)
        offset, lines = self._lines(log_offset)
        return {"status": status, "count": count, "events": events, "offset": offset, "lines": lines}

    def feed(self, driver: str, number: int, rows: Sequences, state: Any, held_by_all: int) -> bool:
        """Send a batch to the worker. Returns False if there is no room for it."""
        worker = self._worker_for(driver)
        return worker is not None and worker.feed(number, rows, state, held_by_all)

    def stop(self, driver: str) -> None:
        """Let the worker save and end."""
        if worker := self._worker_for(driver):
            worker.stop()

    def kill(self, driver: str) -> None:
        """End the worker at once."""
        self._worker_for(driver)
        with self._lock:
            if self._worker is not None:
                self._worker.kill()

    def close(self) -> None:
        """Stop watching the driver. No other method may be called afterwards."""
        self._closed.set()
        self._log.close()

    def process(self) -> Process | None:
        """The process of this agent."""
        return processes.identify(os.getpid())

    def _worker_for(self, driver: str) -> WorkerProcess | None:
        """The worker, for a call of the driver. Raises TakenOver if the agent belongs to another driver."""
        if driver != self._driver:
            raise TakenOver("another driver has taken over this run")
        self._contact_at = time.monotonic()
        return self._worker

    def _lines(self, offset: int) -> tuple[int, list[str]]:
        """The complete lines of the log from `offset`, and the offset of their end."""
        content = read_log(self._log, offset, LINES_BYTES)
        complete = content.rpartition(b"\n")[0] + b"\n" if b"\n" in content else b""
        if not complete and len(content) == LINES_BYTES:
            # one line that is longer than the limit
            complete = content
        return offset + len(complete), complete.decode(errors="replace").splitlines()

    def _watch_driver(self) -> None:
        stop_requested = False
        while not self._closed.wait(1.0):
            contact_age_s, worker = time.monotonic() - self._contact_at, self._worker
            if contact_age_s < self._settings["driver_timeout"]:
                stop_requested = False
            elif worker is not None and worker.running and not stop_requested:
                stop_requested = True
                worker.stop()
            if contact_age_s > self._settings["driver_wait"]:
                if worker is not None:
                    worker.kill()
                if self._ends_process:
                    os._exit(0)
                return
