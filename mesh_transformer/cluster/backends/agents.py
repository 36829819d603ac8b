"""The interface of a cluster: one agent on each host. `ProcessCluster` has its agents in the driver's own process."""

import abc
import functools
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesh_transformer.cluster.base import Event, Job, Poll, Status, Variables
from mesh_transformer.cluster.host import processes
from mesh_transformer.cluster.host.agent import TAKEOVER_AFTER_S, Agent, TakenOver
from mesh_transformer.errors import UserError
from mesh_transformer.sequences import Sequences

STATUS_TIMEOUT_S = 3.0
# after this time the agents accept this driver if the previous one is dead
TAKEOVER_TIMEOUT_S = TAKEOVER_AFTER_S + 3.0
# an agent answers within a second, and drops a batch that it has already
FEED_TIMEOUT_S = 5.0
# for all other calls
CALL_TIMEOUT_S = 30.0
# libtpu has no default for the port at which slices reach each other
MEGASCALE_PORT = "8080"


@dataclass(frozen=True)
class NoAnswer:
    """Replaces the answer of an agent that did not answer in time, or cannot answer any more (`lost` says why)."""

    lost: str | None = None


@dataclass
class _Record:
    """What the driver knows of one worker: the last status, its time, and how much of events and log it has read."""

    status: Status
    answered_at: float
    events_read: int = 0
    log_offset: int = 0


class AgentCluster(abc.ABC):
    """A fixed number of hosts with one worker each, worker i on host i. A subclass starts their agents and calls them.

    Every call returns within seconds. A dead worker or agent raises no exception: `poll` returns its state.

    Args:
        count: number of hosts.
        environment: variables of the worker processes, added to those of their host.
        slices: number of TPU slices, with the same number of hosts each; the hosts are numbered slice by slice.

    Raises:
        UserError: the hosts do not divide by the slices.
    """

    def __init__(self, count: int, environment: Variables | None = None, slices: int = 1):
        if count % slices:
            raise UserError(
                f"--slices {slices}: {count} hosts do not divide into {slices} slices: change one of the numbers"
            )
        self.count, self.slices, self._environment = count, slices, environment or {}
        self._driver = uuid.uuid4().hex
        self._records: list[_Record] = []

    @abc.abstractmethod
    def _open_agents(self) -> None:
        """Find or start all agents. Raises the same exceptions as `attach`."""

    @abc.abstractmethod
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Call a method of all agents at the same time, each with its own arguments.

        Returns:
            One answer for each agent; `NoAnswer` if it did not answer in time or raised an exception.

        Raises:
            TakenOver: the agents belong to another driver.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """End all worker processes and agents at once, including those that are stopped or do not answer."""

    def _transferable(self, rows: Sequences) -> Any:
        """The argument of an agent's `feed` for these rows."""
        return rows

    def _host_alive(self, worker_id: int) -> bool | None:
        """Whether the host of an agent is part of the cluster; None if unknown."""
        return None

    def _call_all(self, method: str, timeout_s: float = CALL_TIMEOUT_S) -> list[Any]:
        """Call a method that needs no arguments except the driver's ID."""
        return self._call(method, [(self._driver,)] * self.count, timeout_s)

    def label(self, worker_id: int) -> str:
        """The number of a worker for messages, with its slice if there are several."""
        return str(worker_id) if self.slices == 1 else f"{worker_id} of slice {self._slice_id(worker_id)}"

    def _slice_id(self, worker_id: int) -> int:
        return worker_id * self.slices // self.count

    def attach(self) -> Poll:
        """Find the agents of this run on all hosts, and start those that are missing.

        Raises:
            UserError: another driver has the agents, or a host cannot run an agent.
            HostsMissing: some hosts are not available.
        """
        self._open_agents()
        deadline = time.monotonic() + TAKEOVER_TIMEOUT_S
        while any(answer is False for answer in self._call_all("attach")):
            if time.monotonic() > deadline:
                raise UserError("another driver is running this run: end that one first")
            time.sleep(0.5)
        now = time.monotonic()
        self._records = [_Record(Status(i), now) for i in range(self.count)]
        return self.poll()

    def start(self, job: Job) -> None:
        """Start a job in new processes, which form one mesh. No other job may be running."""
        coordinator = self._call_all("coordinator")[0]
        arguments = [(self._driver, job, self._variables(i, coordinator)) for i in range(self.count)]
        log_sizes, now = self._call("start", arguments, CALL_TIMEOUT_S), time.monotonic()
        self._records = [
            _Record(Status(i, "running"), now, log_offset=0 if isinstance(size, NoAnswer) else size)
            for i, size in enumerate(log_sizes)
        ]

    def poll(self) -> Poll:
        """Query the state of all workers."""
        arguments = [(self._driver, record.events_read, record.log_offset) for record in self._records]
        events: list[tuple[int, Event]] = []
        lines: list[tuple[int, str]] = []
        answers = self._call("status", arguments, STATUS_TIMEOUT_S)
        for i, (record, answer) in enumerate(zip(self._records, answers, strict=True)):
            now = time.monotonic()
            if isinstance(answer, NoAnswer):
                age_s, alive = now - record.answered_at, self._host_alive(i)
                record.status = replace(record.status, lost=answer.lost, answer_age_s=age_s, host_alive=alive)
                continue
            events += [(i, event) for event in answer["events"]]
            lines += [(i, line) for line in answer["lines"]]
            record.status, record.answered_at = answer["status"], now
            record.events_read, record.log_offset = answer["count"], answer["offset"]
        return Poll(tuple(record.status for record in self._records), tuple(events), tuple(lines))

    def feed(self, number: int, batch: Sequences, rows: Sequence[Sequence[int]], state: Any, held_by_all: int) -> bool:
        """Send batch `number` to all workers, to each its rows, with the state of the loader after this batch.

        Args:
            batch: (microbatches, sequences, tokens).
            rows: the sequences of each worker.
            held_by_all: all workers hold the batches up to this number.

        Returns:
            Whether all workers have received it. If not, send it again.
        """
        parts = set(map(tuple, rows))
        shares = {
            part: self._transferable(batch.map(functools.partial(np.take, indices=part, axis=1))) for part in parts
        }
        arguments = [(self._driver, number, shares[tuple(part)], state, held_by_all) for part in rows]
        return all(answer is True for answer in self._call("feed", arguments, FEED_TIMEOUT_S))

    def stop(self) -> None:
        """Send SIGTERM to every worker process: the job saves and ends."""
        self._call_all("stop")

    def _variables(self, worker_id: int, coordinator: Any) -> Variables:
        """The environment of a worker. The JAX_ variables connect several processes to one mesh."""
        alone = self.count == 1 or isinstance(coordinator, NoAnswer)
        values = (None, None, None) if alone else (coordinator, str(self.count), str(worker_id))
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        slices = {} if alone or self.slices == 1 else self._slice_variables(worker_id, coordinator)
        return {**self._environment, **dict(zip(names, values, strict=True)), **slices}

    def _slice_variables(self, worker_id: int, coordinator: str) -> Variables:
        """The variables with which libtpu connects several slices. They replace those of the host's metadata, which may
        describe slices that are gone.

        Source: jax/_src/clusters/cloud_tpu_cluster.py.
        """
        port = self._environment.get("MEGASCALE_PORT") or MEGASCALE_PORT
        return {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{coordinator.rpartition(':')[0]}:{port}",
            "MEGASCALE_PORT": port,
            "MEGASCALE_NUM_SLICES": str(self.slices),
            "MEGASCALE_SLICE_ID": str(self._slice_id(worker_id)),
        }


class ProcessCluster(AgentCluster):
    """Several processes of this machine, with agents in the driver's process.

    When the driver dies, the workers save and end. The environment selects the devices of a worker, as for any process.
    """

    def __init__(self, run: str, count: int, environment: Variables | None = None, slices: int = 1):
        super().__init__(count, environment, slices)
        self._run = run
        self._agents: list[Agent] = []
        # several calls of an agent can run at the same time: the streamer has a thread of its own
        self._pool = ThreadPoolExecutor(4 * count)

    def _open_agents(self) -> None:
        if not self._agents:
            # agents in this process cannot reject another driver
            self._lock = processes.lock_driver(self._run)
            self._agents = [Agent(i, self._run, ends_process=False) for i in range(self.count)]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        calls = [
            self._pool.submit(getattr(agent, method), *values)
            for agent, values in zip(self._agents, arguments, strict=True)
        ]
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(call.result(timeout_s))
            except TimeoutError:
                answers.append(NoAnswer())
            except TakenOver:
                raise
            except Exception as error:  # noqa: BLE001  (any error of the host)
                answers.append(NoAnswer(lost=f"its agent failed: {error}"))
        return answers

    def kill(self) -> None:
        if self._agents:
            self._call_all("kill")
            for agent in self._agents:
                agent.close()
            os.close(self._lock)
            self._agents = []
