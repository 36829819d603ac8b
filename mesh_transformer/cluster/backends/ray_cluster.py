"""A cluster of Ray actors, one agent on each host.

Of this package, only this module, dataset/ray_pool.py and ray_join.py import Ray.

Host i is the node with the custom resource `tpu_worker_<i>`. If no node has such a resource, it is the node with the
label ray.io/tpu-worker-id, which Ray sets on TPU hosts. The number is the TPU worker ID, not a rank of Ray. Agents are
detached actors, so they outlive the driver. The next driver finds them by their names, which contain the run's name.
Ray never restarts an agent.

When the head dies, its nodes end within a minute. Ray ends a driver that calls the dead head, or that uses the object
store of its own node when this node has died. So the driver checks both first, leaves that cluster, and joins the next
one at the same address.
"""

import dataclasses
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mesh_transformer import ray_join
from mesh_transformer.cluster.backends.agents import AgentCluster, NoAnswer
from mesh_transformer.cluster.base import Hosts, HostsMissing, Poll, Process, Variables
from mesh_transformer.cluster.host import processes
from mesh_transformer.cluster.host.agent import Agent, TakenOver
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log
from mesh_transformer.sequences import Sequences

NAMESPACE = "mesh-transformer"
RESOURCE = "tpu_worker_"
LABEL = "ray.io/tpu-worker-id"
# time in which Ray frees the name of an actor that has ended
STOP_TIMEOUT_S = 20.0
# for a task that kills processes that do not answer
KILL_TIMEOUT_S = 20.0
# a head that is unreachable for this time counts as dead; Ray ends its clients after 60 s
HEAD_TIMEOUT_S = 12.0
HEAD_PROBE_TIMEOUT_S = 2.0
# smaller arrays are part of the call, as for Ray's own arguments; larger ones use the object store
INLINE_BYTES = 64 << 10
MAX_THREADS = 64


class RayCluster(AgentCluster):
    """Agents on the hosts of a Ray cluster.

    Args:
        run: name of the run.
        hosts: the machines of the cluster. They can kill processes of a host that Ray does not reach.
        environment: variables of the worker processes.

    Raises:
        UserError: there is no such cluster, or none of its nodes has the number of a host.
    """

    def __init__(self, run: str, hosts: Hosts, environment: Variables):
        nodes = self._join(hosts.address)
        if hosts.count is None and not nodes:
            raise UserError(
                f"no node of the Ray cluster {hosts.address} has the number of a host: start each node with "
                f"ray start --resources='{{\"{RESOURCE}0\": 1}}' (1, 2 ... on the other hosts), as docs/driver.md shows"
            )
        super().__init__(hosts.count or max(nodes) + 1, {**_RAY_VARIABLES, **environment}, hosts.slices)
        self._run, self._hosts = run, hosts
        self._actors: list[Any] = []
        # the processes of the agents
        self._processes: list[Process | None] = [None] * self.count
        self._node_ids: dict[int, Any] = {}
        # calls of `status` without an answer
        self._pending: dict[int, Any] = {}

    def _join(self, address: str) -> dict[int, dict[str, Any]]:
        """Join the cluster at an address. Returns the living nodes by the number of their host."""
        if not ray.is_initialized():
            ray_join.join(address, namespace=NAMESPACE)
        context, nodes = ray.get_runtime_context(), ray.nodes()
        own_node = next(node for node in nodes if node["NodeID"] == context.get_node_id())
        self._address = str(context.gcs_address)
        self._own_node_address = f"{own_node['NodeManagerAddress']}:{own_node['NodeManagerPort']}"
        self._head_answered = time.monotonic()
        return _nodes_by_host(nodes)

    def poll(self) -> Poll:
        if (failure := self._head_failure()) is None:
            return super().poll()
        statuses = (record.status for record in self._records)
        return Poll(tuple(dataclasses.replace(s, lost=failure, answer_age_s=HEAD_TIMEOUT_S) for s in statuses))

    def _head_failure(self) -> str | None:
        """Why the head counts as dead: it, or the node of this machine, refuses connections or is unreachable for
        HEAD_TIMEOUT_S.

        None while both are reachable.
        """
        now = time.monotonic()
        try:
            for address in (self._address, self._own_node_address):
                ray_join.probe(address, HEAD_PROBE_TIMEOUT_S)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError) or now - self._head_answered > HEAD_TIMEOUT_S:
                return f"the head of the Ray cluster, {address}, is gone: {error}"
        else:
            self._head_answered = now
        return None

    def feed(self, number: int, batch: Sequences, rows: Sequence[Sequence[int]], state: Any, held_by_all: int) -> bool:
        return self._head_failure() is None and super().feed(number, batch, rows, state, held_by_all)

    def _open_agents(self) -> None:
        try:
            nodes = self._join(self._address)
        except (UserError, RayError) as error:
            raise HostsMissing(ray_join.first_line(error)) from error
        if missing := [i for i in range(self.count) if i not in nodes]:
            text = f"{len(missing)} of {self.count} hosts are not in the Ray cluster: numbers {missing}"
            raise HostsMissing(text)
        self._node_ids = {i: nodes[i]["NodeID"] for i in range(self.count)}
        self._pending.clear()
        self._actors = [self._find_or_start_agent(i, nodes[i]) for i in range(self.count)]
        answers = self._call("process", [()] * self.count, 60.0)
        for i, answer in enumerate(answers):
            if isinstance(answer, NoAnswer) and answer.lost and "creation task" in answer.lost:
                raise UserError(f"host {i} cannot run an agent of this program: {answer.lost}")
        self._processes = [None if isinstance(answer, NoAnswer) else answer for answer in answers]

    def _find_or_start_agent(self, worker_id: int, node: dict[str, Any]) -> Any:
        """The agent of this run on a host."""
        name = f"{self._run}-{worker_id}"
        if (actor := _find_actor(name)) is not None:
            return actor
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_concurrency": 8}
        agent_class = ray.remote(Agent).options(max_restarts=0, **options, **_on_node(node["NodeID"]))
        return agent_class.remote(worker_id, self._run, node["NodeManagerAddress"])

    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
        calls = []
        for i, (actor, actor_arguments) in enumerate(zip(self._actors, arguments, strict=True)):
            pending = self._pending.get(i) if method == "status" else None
            calls.append(pending if pending is not None else getattr(actor, method).remote(*actor_arguments))
        ready = set(ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0])
        if method == "status":
            self._pending = {i: call for i, call in enumerate(calls) if call not in ready}
        return [_answer(call) if call in ready else NoAnswer() for call in calls]

    def _transferable(self, rows: Sequences) -> Any:
        return ray.put(rows) if rows.nbytes > INLINE_BYTES else rows

    def _host_alive(self, worker_id: int) -> bool | None:
        try:
            node_id = self._node_ids.get(worker_id)
            return any(node["Alive"] for node in ray.nodes() if node["NodeID"] == node_id)
        except RayError:
            return None

    def kill(self) -> None:
        if not self._actors:
            return
        answers = self._call_all("kill", 12.0)
        actors, self._actors = self._actors, []
        if self._head_failure() is not None:
            ray.shutdown()
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        silent = [i for i, answer in enumerate(answers) if isinstance(answer, NoAnswer)]
        if silent and not self._hosts.deleted():
            # at the same time, because each host that is gone takes seconds
            with ThreadPoolExecutor(min(len(silent), MAX_THREADS)) as pool:
                list(pool.map(self._kill_unresponsive, silent))
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(_find_actor(f"{self._run}-{i}") is not None for i in range(self.count)):
            if time.monotonic() > deadline:
                log.warning("Ray has not ended all agents of this run")
                break
            time.sleep(0.1)

    def _kill_unresponsive(self, worker_id: int) -> None:
        """Send SIGKILL to the worker and the agent of a host: through a task on its node, or through `Hosts.kill`."""
        worker = self._records[worker_id].status.process if self._records else None
        known = [process for process in (worker, self._processes[worker_id]) if process is not None]
        if self._host_alive(worker_id):
            task = ray.remote(processes.kill).options(max_retries=0, **_on_node(self._node_ids[worker_id]))
            try:
                ray.get(task.remote(known), timeout=KILL_TIMEOUT_S)
                return
            except (RayError, GetTimeoutError) as error:
                log.warning("host %d: Ray could not end its processes: %s", worker_id, ray_join.first_line(error))
        self._hosts.kill(worker_id, known)


def _on_node(node_id: str) -> dict[str, Any]:
    """Options that place a task or actor on one node, without a claim on its CPUs."""
    return {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False)}


# Ray sets these variables for its own workers; they would slow ours down
_RAY_VARIABLES: Variables = {"OMP_NUM_THREADS": None}


def _nodes_by_host(nodes: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The living nodes by the number of their host.

    Raises:
        UserError: two hosts have the same label. TPU worker IDs begin at 0 in each slice.
    """
    numbered: dict[int, dict[str, Any]] = {}
    labeled: dict[int, dict[str, Any]] = {}
    repeated: set[int] = set()
    for node in nodes:
        if node["Alive"]:
            for name in node["Resources"]:
                if match := re.fullmatch(rf"{RESOURCE}(\d+)", name):
                    numbered[int(match[1])] = node
            if (label := (node.get("Labels") or {}).get(LABEL, "")).isdigit():
                other = labeled.get(int(label), node)
                if other["NodeManagerAddress"] != node["NodeManagerAddress"]:
                    repeated.add(int(label))
                labeled[int(label)] = node
    if repeated and not numbered:
        raise UserError(
            f"several hosts of the Ray cluster have the labels {LABEL}={sorted(repeated)}: number the hosts of all "
            f"slices, slice by slice, with ray start --resources='{{\"{RESOURCE}0\": 1}}', as docs/driver.md shows"
        )
    return numbered or labeled


def _find_actor(name: str) -> Any:
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
    except RayError:
        # such as unavailable: the agent may answer later
        return NoAnswer()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "creation task" in text:
        return f"in its creation task: {text[-600:]}"
    return "its agent has died"
