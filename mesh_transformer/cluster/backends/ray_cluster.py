"""A cluster of Ray actors, one agent on each host. The only module that knows Ray.

Host i is the node with the custom resource `tpu_worker_<i>` or, where no node has one, the label ray.io/tpu-worker-id that Ray
itself gives to TPU hosts: the number is the TPU's own, not Ray's rank. Agents are detached actors, so they outlive the
driver; their names, made from the run's, are how the next driver finds them. Ray never restarts one.

A cluster whose head has died is over: its nodes end within a minute, and a driver that asks the head for anything, or puts
something in the object store of its own node when that has died, is ended by Ray. So the driver looks for both by itself,
lets go of that cluster, and joins the next one at the same address.
"""

import dataclasses
import logging
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mesh_transformer.cluster.backends.agents import AgentCluster, NoAnswer
from mesh_transformer.cluster.base import Hosts, HostsMissing, Poll, Process, Variables
from mesh_transformer.cluster.host import processes as host
from mesh_transformer.cluster.host.agent import Agent, TakenOver
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

NAMESPACE = "mesh-transformer"
RESOURCE = "tpu_worker_"
LABEL = "ray.io/tpu-worker-id"
END_S = 20.0  # for an ended actor to give its name back
REACH_S = 10.0
HELPER_S = 20.0  # for a task that kills what does not answer
HEAD_S = 12.0  # a head that cannot be reached for so long is gone; Ray ends its clients after 60
HEAD_ANSWER_S = 2.0
INLINE_BYTES = 64 << 10  # what is smaller goes with the call, as Ray does it, not through the object store


class RayCluster(AgentCluster):
    """Agents on the hosts of a Ray cluster.

    Args:
        run: name of the run.
        hosts: of the cluster; they can kill processes of a host that Ray does not reach.
        environment: variables of the worker processes.

    Raises:
        UserError: there is no such cluster, or none of its nodes is a numbered host.
    """

    def __init__(self, run: str, hosts: Hosts, environment: Variables):
        found = self._join(hosts.address)
        if hosts.count is None and not found:
            raise UserError(
                f"no node of the Ray cluster {hosts.address} says which host it is: start each with "
                f"ray start --resources='{{\"{RESOURCE}0\": 1}}' (1, 2 ... on the others), as docs/driver.md shows"
            )
        super().__init__(hosts.count or max(found) + 1, {**_RAYS_OWN, **environment})
        self._run, self._hosts = run, hosts
        self._actors: list[Any] = []
        self._processes: list[Process | None] = [None] * self.count  # of the agents
        self._places: dict[int, Any] = {}  # node ids
        self._waiting: dict[int, Any] = {}  # status calls without an answer yet

    def _join(self, address: str) -> dict[int, dict[str, Any]]:
        """Be in the cluster at an address. Returns the living nodes that are numbered hosts."""
        _connect(address)
        context, nodes = ray.get_runtime_context(), ray.nodes()
        own = next(node for node in nodes if node["NodeID"] == context.get_node_id())
        self._address = str(context.gcs_address)
        self._own_node = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"
        self._head_answered = time.monotonic()
        return _numbered(nodes)

    def poll(self) -> Poll:
        if (gone := self._head_gone()) is None:
            return super().poll()
        statuses = (dataclasses.replace(known.status, lost=gone, silent_s=HEAD_S) for known in self._known)
        return Poll(tuple(statuses))

    def _head_gone(self) -> str | None:
        """Why the head counts as gone: nobody listens there or at this machine's node, or they were not reached for HEAD_S."""
        now = time.monotonic()
        try:
            for address in (self._address, self._own_node):
                _reach(address, HEAD_ANSWER_S)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or now - self._head_answered > HEAD_S:
                return f"the head of the Ray cluster, {address}, is gone: {error}"
        else:
            self._head_answered = now
        return None

    def feed(
        self, number: int, batch: np.ndarray, rows: Sequence[Sequence[int]], state: Any, held: int
    ) -> bool:
        return self._head_gone() is None and super().feed(number, batch, rows, state, held)

    def _open(self) -> None:
        try:
            nodes = self._join(self._address)
        except (UserError, RayError) as error:
            raise HostsMissing(_line(error)) from error
        if missing := [i for i in range(self.count) if i not in nodes]:
            told = f"{len(missing)} of {self.count} are not in the Ray cluster: numbers {missing}"
            raise HostsMissing(told)
        self._places = {i: nodes[i]["NodeID"] for i in range(self.count)}
        self._waiting.clear()
        self._actors = [self._agent(i, nodes[i]) for i in range(self.count)]
        answers = self._call("process", [()] * self.count, 60.0)
        for i, answer in enumerate(answers):
            if isinstance(answer, NoAnswer) and answer.lost and "creation task" in answer.lost:
                raise UserError(f"host {i} cannot run an agent of this program: {answer.lost}")
        self._processes = [None if isinstance(answer, NoAnswer) else answer for answer in answers]

    def _agent(self, worker_id: int, node: dict[str, Any]) -> Any:
        """The agent of this run that is on a host already, or a new one."""
        name = f"{self._run}-{worker_id}"
        if (actor := _existing(name)) is not None:
            return actor
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_concurrency": 8}
        make = ray.remote(Agent).options(max_restarts=0, **options, **_on(node["NodeID"]))
        return make.remote(worker_id, self._run, node["NodeManagerAddress"])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        calls = []
        for i, (actor, given) in enumerate(zip(self._actors, arguments, strict=True)):
            waiting = self._waiting.get(i) if method == "status" else None
            calls.append(waiting if waiting is not None else getattr(actor, method).remote(*given))
        ready = set(ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0])
        if method == "status":
            self._waiting = {i: call for i, call in enumerate(calls) if call not in ready}
        return [_answer(call) if call in ready else NoAnswer() for call in calls]

    def _share(self, rows: np.ndarray) -> Any:
        return ray.put(rows) if rows.nbytes > INLINE_BYTES else rows

    def _host_alive(self, worker_id: int) -> bool | None:
        try:
            place = self._places.get(worker_id)
            return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == place)
        except RayError:
            return None

    def kill(self) -> None:
        if not self._actors:
            return
        answers = self._order("kill", 12.0)
        actors, self._actors = self._actors, []
        if self._head_gone() is not None:
            ray.shutdown()
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        for i, answer in enumerate(answers):
            if isinstance(answer, NoAnswer):
                self._kill_by_hand(i)
        deadline = time.monotonic() + END_S
        while any(_existing(f"{self._run}-{i}") is not None for i in range(self.count)):
            if time.monotonic() > deadline:
                log.warning("Ray has not ended all agents of this run")
                break
            time.sleep(0.1)

    def _kill_by_hand(self, worker_id: int) -> None:
        """A stopped process answers to nothing but SIGKILL: by a task on its node, or else by whoever owns the host."""
        worker = self._known[worker_id].status.process if self._known else None
        known = [process for process in (worker, self._processes[worker_id]) if process is not None]
        if self._host_alive(worker_id):
            task = ray.remote(host.kill).options(max_retries=0, **_on(self._places[worker_id]))
            try:
                ray.get(task.remote(known), timeout=HELPER_S)
                return
            except (RayError, GetTimeoutError) as error:
                log.warning("host %d: its processes were not ended through Ray: %s", worker_id, _line(error))
        for process in known:
            self._hosts.kill(worker_id, process)


def _on(node_id: str) -> dict[str, Any]:
    """Options of what runs on one node, beside whatever runs there."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


# What Ray sets for its own workers and would limit ours.
_RAYS_OWN: Variables = {"OMP_NUM_THREADS": None}


def _connect(address: str) -> None:
    if ray.is_initialized():
        return
    try:
        _reach(address, REACH_S)  # Ray itself tries for three minutes
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RayError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {address}: {_line(error)}. Where it asks for a token, set RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH here too"
        ) from error


def _reach(address: str, timeout_s: float) -> None:
    """Raises OSError if nobody listens at host:port; an address of another form is not tried."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout_s).close()


def _numbered(nodes: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The living nodes that are numbered hosts."""
    numbered, labelled = {}, {}
    for node in nodes:
        if node["Alive"]:
            for name in node["Resources"]:
                if match := re.fullmatch(rf"{RESOURCE}(\d+)", name):
                    numbered[int(match[1])] = node
            if (label := (node.get("Labels") or {}).get(LABEL, "")).isdigit():
                labelled[int(label)] = node
    return numbered or labelled


def _existing(name: str) -> Any:
    try:
        return ray.get_actor(name, NAMESPACE)
    except ValueError:
        return None


def _answer(call: Any) -> Any:
    try:
        return ray.get(call)
    except TakenOver:
        raise
    except ActorDiedError as error:
        return NoAnswer(lost=_reason(error))
    except RayTaskError as error:
        return NoAnswer(lost=f"its agent failed: {str(error).strip().rpartition(chr(10))[2]}")
    except RayError:  # such as unavailable: perhaps it comes back
        return NoAnswer()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "creation task" in text:
        return f"in its creation task: {text[-600:]}"
    return "its agent has died"


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
