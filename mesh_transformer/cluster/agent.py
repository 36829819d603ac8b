"""The agent of a run on one host: starts its worker process, answers the driver, and looks after both.

An agent never computes and never imports jax: whatever happens to the worker, its methods answer at once. It outlives the
driver: when none has asked for a while, it lets the worker save and end, and waits for the next driver.
"""

import os
import socket
import threading
import time
from typing import Any

import numpy as np

from mesh_transformer.cluster import host
from mesh_transformer.cluster.base import Job, Status, Variables
from mesh_transformer.cluster.worker_process import WorkerProcess, read_log

DRIVER_GONE_S = 5.0  # after which another driver may take over
LINES_BYTES = 65536  # of the worker's output, at most, in one answer


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
        self._driver_timeout_s, self._driver_wait_s = 20.0, 3600.0
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
            settings = job.config["cluster"]
            self._driver_timeout_s = settings["driver_timeout"]
            self._driver_wait_s = settings["driver_wait"]
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

    def process(self) -> host.Process | None:
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
            if silent_s < self._driver_timeout_s:
                told = False
            elif worker is not None and worker.running and not told:
                told = True
                worker.stop()
            if silent_s > self._driver_wait_s:
                if worker is not None:
                    worker.kill()
                if self._ends_process:
                    os._exit(0)
                return
