"""A cluster of several processes of this machine. They end with the driver, having saved."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FuturesTimeout
from typing import Any

from mesh_transformer.cluster import host
from mesh_transformer.cluster.agent import Agent, TakenOver
from mesh_transformer.cluster.agents import AgentCluster, NoAnswer
from mesh_transformer.cluster.base import Variables


class ProcessCluster(AgentCluster):
    """Agents in the driver's own process. Each worker has the devices that the environment gives to any process here."""

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
            except FuturesTimeout:
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
