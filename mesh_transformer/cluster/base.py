"""What a driver knows of a cluster: a job, the state of each worker, and the machines under them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mesh_transformer import files
from mesh_transformer.config import Config

State = Literal["idle", "running", "ended"]
Category = Literal["user", "run", "bug", "machine"]


class Process(NamedTuple):
    """One process of a host, and no later one of the same number.

    Args:
        started: when it did, in clock ticks since the host's start.
    """

    pid: int
    started: int


@dataclasses.dataclass(frozen=True)
class Job:
    """What all workers of a cluster do together: a name of `worker.JOBS`, a config and arguments, all JSON values.

    `folder` is where relative paths begin; a host that does not have it takes the folder of the code.
    """

    name: str
    config: dict[str, Any]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    folder: str = ""

    @classmethod
    def of(cls, name: str, config: Config, **arguments: Any) -> Job:
        """A job of the current folder."""
        return cls(name, config.model_dump(mode="json"), arguments, os.getcwd())

    @property
    def key(self) -> str:
        """Equal for equal jobs: a driver that starts again knows its own by it."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def run_name(config: Config) -> str:
    """A short name of the run's folder, unlike that of any other folder: letters, digits, - and _."""
    root = config.checkpoint.root
    whole = root if files.is_remote(root) else os.path.abspath(root)
    last = "".join(c if c.isalnum() and c.isascii() else "_" for c in os.path.basename(whole.rstrip("/")))
    return f"{last[:40]}-{hashlib.sha256(whole.encode()).hexdigest()[:10]}"


@dataclasses.dataclass(frozen=True)
class WorkerError:
    """The exception that ended a worker's job."""

    category: Category
    message: str
    traceback: str


@dataclasses.dataclass(frozen=True)
class Status:
    """What the driver last saw of one worker. Times are in seconds, by the clock of the worker's host.

    Args:
        lost: why its agent is known to be gone; None if it is not.
        silent_s: since its agent answered last, by the driver's clock.
        host_alive: whether its host is still part of the cluster; None if nobody can say.
        process: the worker process; None if there is none, or its host cannot tell.
        exit_code: as in `subprocess`: minus the signal that killed it.
        beat_age_s: since the thread of the job announced anything.
        idle_s: since it showed any sign of work (`liveness`), or had no batch to take from the driver.
        alive_age_s: since any thread of the process announced anything.
        slowest_step_s: the longest step so far, of which each one after it takes 1 %; 0 before there was one.
        begun: where the run began: {"step", "total", "steps_redone", "chips"}; None before.
        tail: the end of the process's output, once it has ended.
    """

    worker_id: int
    state: State = "idle"
    lost: str | None = None
    silent_s: float = 0.0
    host_alive: bool | None = None
    process: Process | None = None
    exit_code: int | None = None
    phase: str = "start"
    step: int = 0
    beat_age_s: float = 0.0
    idle_s: float = 0.0
    alive_age_s: float = 0.0
    slowest_step_s: float = 0.0
    error: WorkerError | None = None
    begun: dict[str, Any] | None = None
    tail: str = ""
    job_key: str | None = None


Variables = Mapping[str, str | None]  # of the environment, on top of what is there; None removes one
Event = dict[str, Any]  # {"kind": "metrics", ...}: see host/worker.py


@dataclasses.dataclass(frozen=True)
class Poll:
    """One look at all workers: states, and what is new of each since the look before."""

    statuses: tuple[Status, ...]
    events: tuple[tuple[int, Event], ...] = ()  # (worker id, event), in order for each worker
    lines: tuple[tuple[int, str], ...] = ()  # (worker id, line of its output)


class HostsMissing(RuntimeError):
    """Some hosts of the cluster are not there now."""


@dataclasses.dataclass
class Hosts:
    """The machines under a cluster, for what Ray cannot do. Here nobody can: whoever runs that cluster brings them back.

    Args:
        address: of the Ray cluster on them, as ray.init takes it.
        count: of those to use; None: all that there are now.
    """

    address: str = ""
    count: int | None = None

    def state(self) -> str | None:
        """The state of the slice, as the cloud names it (READY, PREEMPTED ...), GONE without one; None if unknown."""
        return None

    def kill(self, worker_id: int, process: Process) -> None:
        """Send SIGKILL to a process of a host, if both are there."""

    def remake(self) -> None:
        """Bring back every host that is missing, ready to run agents. Returns when all are there, or when somebody else is to
        bring them: `AgentCluster.attach` sees when.

        Raises:
            UserError: the cloud refuses, for a reason that waiting does not mend.
        """
