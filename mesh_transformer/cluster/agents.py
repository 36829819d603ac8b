"""A `Cluster` made of agents, however their methods are called."""

from __future__ import annotations

import abc
import dataclasses
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from mesh_transformer.cluster.agent import DRIVER_GONE_S
from mesh_transformer.cluster.base import Event, Job, Poll, Status, WorkerError
from mesh_transformer.errors import UserError

ANSWER_S = 3.0  # for a status
TAKE_OVER_S = DRIVER_GONE_S + 3.0  # until the agents know that a driver before this one is dead
FEED_S = 5.0  # to take a batch, which an agent answers within a second; one that came twice is dropped
CALL_S = 30.0  # for everything else


@dataclasses.dataclass(frozen=True)
class NoAnswer:
    """In place of an answer: the agent is gone for good (`lost` says why), or silent."""

    lost: str | None = None


@dataclasses.dataclass
class _Known:
    """What the driver remembers of one worker."""

    status: Status
    answered: float
    events: int = 0
    offset: int = 0


class AgentCluster(abc.ABC):
    """The driver's side of the agents' methods; a subclass makes agents and calls them.

    Args:
        count: number of hosts.
        environment: variables of the worker processes, on top of their host's own.
    """

    def __init__(self, count: int, environment: dict[str, str | None] | None = None):
        self.count, self._environment = count, environment or {}
        self._driver = uuid.uuid4().hex
        self._known: list[_Known] = []

    @abc.abstractmethod
    def _open(self) -> None:
        """Find or make all agents. Raises what `Cluster.attach` does."""

    @abc.abstractmethod
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Call a method of every agent, each with its own arguments, all at once; `NoAnswer` where none comes in time.

        Raises:
            TakenOver: the agents obey another driver. Any other exception of a method makes its agent a lost one.
        """

    @abc.abstractmethod
    def _end_agents(self, statuses: Sequence[Status]) -> None:
        """End all agents and their workers, answering or not."""

    def _share(self, rows: np.ndarray) -> Any:
        """What is given to `feed` for these rows."""
        return rows

    def _host_alive(self, worker_id: int) -> bool | None:
        """Whether the host of a silent agent is part of the cluster."""
        return None

    def attach(self) -> Poll:
        self._open()
        deadline = time.monotonic() + TAKE_OVER_S
        while any(answer is False for answer in self._call("attach", [(self._driver,)] * self.count, CALL_S)):
            if time.monotonic() > deadline:
                raise UserError("another driver is running this run: end that one first")
            time.sleep(0.5)
        now = time.monotonic()
        self._known = [_Known(Status(i), now) for i in range(self.count)]
        return self.poll()

    def start(self, job: Job) -> None:
        coordinator = self._call("coordinator", [(self._driver,)] * self.count, CALL_S)[0]
        sizes = self._call(
            "start", [(self._driver, job, self._variables(i, coordinator)) for i in range(self.count)], CALL_S
        )
        now = time.monotonic()
        self._known = [
            _Known(Status(i, "running"), now, offset=0 if isinstance(size, NoAnswer) else size)
            for i, size in enumerate(sizes)
        ]

    def poll(self) -> Poll:
        asked = [(self._driver, known.events, known.offset) for known in self._known]
        answers = self._call("status", asked, ANSWER_S)
        events: list[tuple[int, Event]] = []
        lines: list[tuple[int, str]] = []
        for i, answer in enumerate(answers):
            if not isinstance(answer, NoAnswer):
                events += [(i, event) for event in answer["events"]]
                lines += [(i, line) for line in answer["lines"]]
            self._note(i, answer)
        return Poll(tuple(known.status for known in self._known), tuple(events), tuple(lines))

    def feed(
        self, number: int, batch: np.ndarray, rows: Sequence[Sequence[int]], state: Any, held: int
    ) -> bool:
        shares = {part: self._share(np.take(batch, part, axis=1)) for part in set(map(tuple, rows))}
        given = [(self._driver, number, shares[tuple(part)], state, held) for part in rows]
        return all(answer is True for answer in self._call("feed", given, FEED_S))

    def stop(self) -> None:
        self._call("stop", [(self._driver,)] * self.count, CALL_S)

    def kill(self, statuses: Sequence[Status]) -> None:
        self._end_agents(statuses)

    def close(self) -> None:
        self._end_agents([known.status for known in self._known])

    def _variables(self, worker_id: int, coordinator: Any) -> dict[str, str | None]:
        """One mesh of all processes; a single process is one without further ado."""
        if self.count == 1 or isinstance(coordinator, NoAnswer):
            alone = dict.fromkeys(("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
            return {**self._environment, **alone}
        return {
            **self._environment,
            "JAX_COORDINATOR_ADDRESS": coordinator,
            "JAX_NUM_PROCESSES": str(self.count),
            "JAX_PROCESS_ID": str(worker_id),
        }

    def _note(self, worker_id: int, answer: Any) -> None:
        known, now = self._known[worker_id], time.monotonic()
        if isinstance(answer, NoAnswer):
            alive = self._host_alive(worker_id)
            silent_s = now - known.answered
            known.status = dataclasses.replace(
                known.status, lost=answer.lost, silent_s=silent_s, host_alive=alive
            )
            return
        facts = dict(answer["facts"])
        if facts.get("error"):
            facts["error"] = WorkerError(**facts["error"])
        known.status, known.answered = Status(worker_id, **facts), now
        known.events, known.offset = answer["count"], answer["offset"]


def same(job: Job, statuses: Sequence[Status]) -> bool:
    """Whether all workers run this job, for a driver before this one."""
    return all(status.state == "running" and status.job_key == job.key for status in statuses)
