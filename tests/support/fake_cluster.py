"""A cluster without processes: a table has the state of the workers at each time."""

import dataclasses
from collections.abc import Callable, Sequence

from mesh_transformer.cluster.base import Hosts, HostsMissing, Poll, Status


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclasses.dataclass
class FakeCluster:
    """A fake `AgentCluster`.

    Args:
        lives: for each start of the job a function from the seconds since then to the statuses.
        found: the statuses at the first `attach`.
        missing: for each restart the number of calls of `attach` that find no hosts.
    """

    lives: Sequence[Callable[[float], Sequence[Status]]]
    clock: Clock
    found: Sequence[Status] = (Status(0), Status(1))
    missing: list[int] = dataclasses.field(default_factory=list)
    count: int = 2
    calls: list[str] = dataclasses.field(default_factory=list)
    starts: list[float] = dataclasses.field(default_factory=list)
    events: list[tuple[int, dict]] = dataclasses.field(default_factory=list)
    asked_to_stop: bool = False
    label: Callable[[int], str] = str

    def attach(self) -> Poll:
        if self.missing and self.starts:
            if self.missing[0] > 0:
                self.missing[0] -= 1
                raise HostsMissing("1 of 2")
            self.missing.pop(0)
        self.calls.append("attach")
        return Poll(tuple(self.found))

    def start(self, job) -> None:
        self.calls.append("start")
        self.starts.append(self.clock.now)
        self.asked_to_stop = False

    def poll(self) -> Poll:
        if not self.starts:
            return Poll(tuple(self.found))
        events, self.events = self.events, []
        life = self.lives[len(self.starts) - 1]
        return Poll(tuple(life(self.clock.now - self.starts[-1])), tuple(events))

    def feed(self, number, batch, rows, state, held_by_all) -> bool:
        return False

    def stop(self) -> None:
        self.calls.append("stop")
        self.asked_to_stop = True

    def kill(self) -> None:
        self.calls.append("kill")


@dataclasses.dataclass
class FakeHosts(Hosts):
    """A slice in the state `state`, which `recreate` sets to READY."""

    state: str | None = "READY"
    recreated: int = 0

    def slice_state(self) -> str | None:
        return self.state

    def recreate(self) -> None:
        self.recreated += 1
        self.state = "READY"
