"""The data types that driver and agents exchange: jobs, the state of each worker, and the machines of a cluster."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mesh_transformer import files
from mesh_transformer.config import Config

# A worker's log marks the lines of an error that it reports. The driver shows the error itself, once.
REPORTED = "reported to the driver: "
WorkerState = Literal["idle", "running", "ended"]
ErrorCategory = Literal["user", "run", "bug", "machine"]


class Process(NamedTuple):
    """Identifies one process of a host, even if its ID is reused later.

    Args:
        start_ticks: its start time, in clock ticks since the host's boot.
    """

    pid: int
    start_ticks: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What all workers of a cluster run together. All values are JSON values.

    Args:
        name: a key of `worker.JOBS`.
        folder: relative paths start here. A host without this folder uses the folder of the code.
    """

    name: str
    config: dict[str, Any]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    folder: str = ""

    @classmethod
    def of(cls, name: str, config: Config, **arguments: Any) -> Job:
        """A job whose relative paths start at the current folder."""
        return cls(name, config.model_dump(mode="json"), arguments, os.getcwd())

    @property
    def key(self) -> str:
        """A hash of the job. A restarted driver compares it with the key of the running job."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def run_name(config: Config) -> str:
    """A short name for the run, unique for its folder: letters, digits, - and _."""
    root = config.checkpoint.root
    path = root if files.is_remote(root) else os.path.abspath(root)
    last = "".join(c if c.isalnum() and c.isascii() else "_" for c in os.path.basename(path.rstrip("/")))
    return f"{last[:40]}-{hashlib.sha256(path.encode()).hexdigest()[:10]}"


@dataclasses.dataclass(frozen=True)
class WorkerError:
    """The exception that ended a worker's job."""

    category: ErrorCategory
    message: str
    traceback: str


@dataclasses.dataclass(frozen=True)
class Status:
    """What the driver knows of one worker. Times are in seconds, by the clock of the worker's host.

    Args:
        lost: why the worker's agent cannot answer any more; None while it can.
        answer_age_s: time since the agent's last answer, by the driver's clock.
        host_alive: whether the host is part of the cluster; None if unknown.
        process: the worker process; None without a process, or on a host without /proc.
        exit_code: as in `subprocess`: negative if a signal killed the process.
        event_age_s: time since the last event of the job's thread.
        idle_s: time since the last sign of work (`liveness`). A wait for a batch of the driver does not count.
        heartbeat_age_s: time since the last message of any thread of the process.
        slowest_step_s: time of the slowest recent step; each later step reduces it by 1%. 0 before the first step.
        start_point: where the run started or resumed: {"step", "total", "steps_redone", "chips"}; None before that.
        tail: the end of the output of a process that has ended.
    """

    worker_id: int
    state: WorkerState = "idle"
    lost: str | None = None
    answer_age_s: float = 0.0
    host_alive: bool | None = None
    process: Process | None = None
    exit_code: int | None = None
    phase: str = "start"
    step: int = 0
    event_age_s: float = 0.0
    idle_s: float = 0.0
    heartbeat_age_s: float = 0.0
    slowest_step_s: float = 0.0
    error: WorkerError | None = None
    start_point: dict[str, Any] | None = None
    tail: str = ""
    job_key: str | None = None


# changes to a process's environment; None removes a variable
Variables = Mapping[str, str | None]
# {"kind": "metrics", ...}: host/worker.py lists the kinds
Event = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Poll:
    """The answers of all agents to one poll.

    Args:
        events: (worker ID, event), new since the last poll, in order for each worker.
        lines: (worker ID, line of its output), new since the last poll.
    """

    statuses: tuple[Status, ...]
    events: tuple[tuple[int, Event], ...] = ()
    lines: tuple[tuple[int, str], ...] = ()


class HostsMissing(RuntimeError):
    """Some hosts of the cluster are not available now."""


@dataclasses.dataclass
class Hosts:
    """The machines of a cluster, for operations that Ray does not offer. This base class cannot do them: the owner of
    the Ray cluster replaces lost hosts.

    Args:
        address: address of the Ray cluster on the hosts, as `ray.init` accepts it.
        count: number of hosts; None: all hosts of the cluster.
        slices: number of TPU slices; the hosts are numbered slice by slice.
    """

    address: str = ""
    count: int | None = None
    slices: int = 1

    def slice_state(self) -> str | None:
        """The state of the slice in the cloud's words (READY, PREEMPTED ...); GONE without a slice; None if unknown."""
        return None

    def deleted(self) -> bool:
        """Whether the cloud takes all machines, so that `recreate` makes new ones. False if unknown."""
        return False

    def kill(self, worker_id: int, processes: Sequence[Process]) -> None:
        """Send SIGKILL to those of the processes of a host that still run. Threads may call it at the same time."""

    def recreate(self) -> None:
        """Replace every missing host and prepare it for agents.

        Returns when all hosts are ready, or at once if somebody else replaces them. `AgentCluster.attach` finds them.

        Raises:
            UserError: the cloud refuses for a reason that does not pass with time.
        """
