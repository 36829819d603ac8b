"""A cluster is its agents, one on each host, however their methods are called: here, in the driver's own process."""

import abc
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesh_transformer.cluster.base import Event, Job, Poll, Status, Variables
from mesh_transformer.cluster.host import processes as host
from mesh_transformer.cluster.host.agent import DRIVER_GONE_S, Agent, TakenOver
from mesh_transformer.errors import UserError

ANSWER_S = 3.0  # for a status
TAKE_OVER_S = DRIVER_GONE_S + 3.0  # until the agents know that a driver before this one is dead
FEED_S = 5.0  # to take a batch, which an agent answers within a second; one that came twice is dropped
CALL_S = 30.0  # for everything else


@dataclass(frozen=True)
class NoAnswer:
    """In place of an answer: the agent is gone for good (`lost` says why), or silent."""

    lost: str | None = None


@dataclass
class _Known:
    """What the driver remembers of one worker."""

    status: Status
    answered: float
    events: int = 0
    offset: int = 0


class AgentCluster(abc.ABC):
    """A fixed number of hosts with one worker each, number i on host i; a subclass makes their agents and calls them.

    Every call returns within seconds. A dead or silent worker raises nothing: `poll` shows it.

    Args:
        count: number of hosts.
        environment: variables of the worker processes, on top of their host's own.
    """

    def __init__(self, count: int, environment: Variables | None = None):
        self.count, self._environment = count, environment or {}
        self._driver = uuid.uuid4().hex
        self._known: list[_Known] = []

    @abc.abstractmethod
    def _open(self) -> None:
        """Find or make all agents. Raises what `attach` does."""

    @abc.abstractmethod
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        """Call a method of every agent, each with its own arguments, all at once; `NoAnswer` where none comes in time.

        Raises:
            TakenOver: the agents obey another driver. Any other exception of a method makes its agent a lost one.
        """

    @abc.abstractmethod
    def kill(self) -> None:
        """End every worker process and agent at once, stopped ones and those that do not answer too."""

    def _share(self, rows: np.ndarray) -> Any:
        """What is given to `feed` for these rows."""
        return rows

    def _host_alive(self, worker_id: int) -> bool | None:
        """Whether the host of a silent agent is part of the cluster."""
        return None

    def _order(self, method: str, timeout_s: float = CALL_S) -> list[Any]:
        return self._call(method, [(self._driver,)] * self.count, timeout_s)

    def attach(self) -> Poll:
        """Find the agents of this run on all hosts, or make those that are missing.

        Raises:
            UserError: another driver has them, or a host cannot run an agent.
            HostsMissing: not all hosts are there.
        """
        self._open()
        deadline = time.monotonic() + TAKE_OVER_S
        while any(answer is False for answer in self._order("attach")):
            if time.monotonic() > deadline:
                raise UserError("another driver is running this run: end that one first")
            time.sleep(0.5)
        now = time.monotonic()
        self._known = [_Known(Status(i), now) for i in range(self.count)]
        return self.poll()

    def start(self, job: Job) -> None:
        """Start a job in new processes, which form one mesh. None may be running."""
        coordinator = self._order("coordinator")[0]
        given = [(self._driver, job, self._variables(i, coordinator)) for i in range(self.count)]
        sizes, now = self._call("start", given, CALL_S), time.monotonic()
        self._known = [
            _Known(Status(i, "running"), now, offset=0 if isinstance(size, NoAnswer) else size)
            for i, size in enumerate(sizes)
        ]

    def poll(self) -> Poll:
        """Look at all workers."""
        asked = [(self._driver, known.events, known.offset) for known in self._known]
        events: list[tuple[int, Event]] = []
        lines: list[tuple[int, str]] = []
        answers = self._call("status", asked, ANSWER_S)
        for i, (known, answer) in enumerate(zip(self._known, answers, strict=True)):
            now = time.monotonic()
            if isinstance(answer, NoAnswer):
                silent_s, alive = now - known.answered, self._host_alive(i)
                known.status = replace(known.status, lost=answer.lost, silent_s=silent_s, host_alive=alive)
                continue
            events += [(i, event) for event in answer["events"]]
            lines += [(i, line) for line in answer["lines"]]
            known.status, known.answered = answer["status"], now
            known.events, known.offset = answer["count"], answer["offset"]
        return Poll(tuple(known.status for known in self._known), tuple(events), tuple(lines))

    def feed(
        self, number: int, batch: np.ndarray, rows: Sequence[Sequence[int]], state: Any, held: int
    ) -> bool:
        """Give batch `number` to all workers, each its rows, with the loader's state behind it.

        Args:
            held: all workers are known to hold the batches up to this one.

        Returns:
            Whether all have taken it; if not, give it again.
        """
        shares = {part: self._share(np.take(batch, part, axis=1)) for part in set(map(tuple, rows))}
        given = [(self._driver, number, shares[tuple(part)], state, held) for part in rows]
        return all(answer is True for answer in self._call("feed", given, FEED_S))

    def stop(self) -> None:
        """Ask the job to save and end: SIGTERM to every worker process."""
        self._order("stop")

    def _variables(self, worker_id: int, coordinator: Any) -> Variables:
        """One mesh of all processes; a single process is one without further ado."""
        alone = self.count == 1 or isinstance(coordinator, NoAnswer)
        values = (None, None, None) if alone else (coordinator, str(self.count), str(worker_id))
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        return {**self._environment, **dict(zip(names, values, strict=True))}


class ProcessCluster(AgentCluster):
    """Several processes of this machine, with agents in the driver's own. They end with the driver, having saved. Each worker has the devices that the environment gives to any process here."""

    def __init__(self, run: str, count: int, environment: Variables | None = None):
        super().__init__(count, environment)
        self._run = run
        self._agents: list[Agent] = []
        self._pool = ThreadPoolExecutor(4 * count)  # the streamer calls beside the main thread

    def _open(self) -> None:
        if not self._agents:
            self._lock = host.hold_as_driver(self._run)  # its agents could not tell another driver
            self._agents = [Agent(i, self._run, ends_process=False) for i in range(self.count)]

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        calls = [
            self._pool.submit(getattr(agent, method), *given)
            for agent, given in zip(self._agents, arguments, strict=True)
        ]
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(call.result(timeout_s))
            except TimeoutError:
                answers.append(NoAnswer())
            except TakenOver:
                raise
            except Exception as error:  # noqa: BLE001  (the host's, whatever it is)
                answers.append(NoAnswer(lost=f"its agent failed: {error}"))
        return answers

    def kill(self) -> None:
        if self._agents:
            self._order("kill")
            for agent in self._agents:
                agent.close()
            os.close(self._lock)
            self._agents = []
