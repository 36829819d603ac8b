"""The hosts of a TPU slice, and what can be done on all of them at once over SSH."""

import getpass
import logging
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from mesh_transformer.errors import RunError, UserError

log = logging.getLogger(__name__)
KEY_FILES = ("~/.ssh/google_compute_engine", "~/.ssh/id_ed25519", "~/.ssh/id_rsa")
SHOWN_LINES = 8  # of a failed host's output in the error


@dataclass(frozen=True)
class Host:
    """One machine of a slice."""

    worker_id: int  # TPU worker id: the index among the slice's network endpoints
    address: str

    def __str__(self) -> str:
        return f"w{self.worker_id} ({self.address})"


@dataclass(frozen=True)
class Access:
    """How to log in to the hosts. Their keys must be in `known_hosts`: an unknown host is refused."""

    known_hosts: str  # a file of OpenSSH's form, by address
    user: str = field(default_factory=getpass.getuser)
    key_file: str | None = None  # None: the SSH agent, and the first of KEY_FILES that is there
    port: int = 22
    connect_timeout_s: float = 10.0
    silence_s: float = 15.0  # a connection whose packets nobody confirms for so long is dropped

    def key_files(self) -> list[str]:
        """The private keys to try.

        Raises:
            UserError: `key_file` is not there.
        """
        if self.key_file is not None:
            path = os.path.expanduser(self.key_file)
            if not os.path.isfile(path):
                raise UserError(
                    f"no SSH key {self.key_file}: make one with `ssh-keygen -t ed25519 -f {self.key_file}`"
                )
            return [path]
        found = [os.path.expanduser(path) for path in KEY_FILES]
        return [path for path in found if os.path.isfile(path)][:1]


@dataclass(frozen=True)
class Outcome:
    """What came of one command on one host."""

    host: Host
    code: int | None  # exit code; None: it was not run to its end, see `fault`
    output: str = ""  # standard output and standard error, as they came
    fault: str | None = None
    refused: bool = False  # the fault is one of keys and accounts, not of the network

    def __str__(self) -> str:
        why = self.fault or f"exit code {self.code}"
        lines = self.output.rstrip().splitlines()[-SHOWN_LINES:]
        return "\n".join([f"{self.host}: {why}", *(f"  {line}" for line in lines)])


class _OfHosts(Exception):
    def __init__(self, message: str, outcomes: Sequence[Outcome]):
        super().__init__(message)
        self.outcomes = tuple(outcomes)


class HostsFailed(_OfHosts, RunError):
    """Some hosts failed; `outcomes` has all hosts'."""


class HostsRefused(_OfHosts, UserError):
    """Every host that failed did so for its key or the user's; `outcomes` has all hosts'."""


Command = str | Callable[[Host], str]


@dataclass(frozen=True)
class Pod:
    """All hosts of a slice. Every method works on all of them at once, or on those of some worker ids."""

    hosts: tuple[Host, ...]
    access: Access

    def run(
        self,
        command: Command,
        hosts: Iterable[int] | None = None,
        *,
        timeout_s: float | None = 60.0,
        check: bool = True,
        echo: bool = False,
        doing: str = "",
    ) -> list[Outcome]:
        """Run a shell command, or one made for each host, and wait for all.

        Args:
            command: given to the login shell of each host.
            hosts: worker ids; None means all.
            timeout_s: for each host; None waits for ever. What timed out may still be running there.
            check: raise if any host fails.
            echo: log each line of output at once, with its host before it.
            doing: for messages; the command if empty.

        Raises:
            HostsFailed, HostsRefused: with `check`, some host could not be reached or its exit code was not 0.
        """
        from mesh_transformer.cloud import ssh

        chosen = self._chosen(hosts)
        outcomes = ssh.run(chosen, self.access, command, timeout_s=timeout_s, echo=echo)
        return _checked(outcomes, doing or _short(command)) if check else outcomes

    def put(self, source: str, target: str, hosts: Iterable[int] | None = None) -> None:
        """Copy a local file to the hosts; `target` is relative to the home folder, and appears whole or not at all.

        Raises:
            HostsFailed, HostsRefused: some host did not get it.
        """
        from mesh_transformer.cloud import ssh

        _checked(ssh.put(self._chosen(hosts), self.access, source, target), f"copying {source}")

    def get(self, source: str, target: Callable[[Host], str], hosts: Iterable[int] | None = None) -> None:
        """Copy a file of each host to the local path `target(host)`.

        Raises:
            HostsFailed, HostsRefused: some host could not give it.
        """
        from mesh_transformer.cloud import ssh

        _checked(ssh.get(self._chosen(hosts), self.access, source, target), f"fetching {source}")

    def kill(self, worker_id: int, pid: int, started: int, *, timeout_s: float = 15.0) -> None:
        """kill -9 a process of one host, even a stopped one; one that is gone is no error.

        Args:
            started: when it did, in clock ticks since the host's start (field 22 of /proc/PID/stat); a later process of the
                same number is left alone.

        Raises:
            HostsFailed, HostsRefused: the host cannot be reached, or the process is somebody else's.
        """
        if pid <= 1:
            raise UserError(f"{pid} is no process to kill")
        self.run(kill_command(pid, started), [worker_id], timeout_s=timeout_s, doing=f"killing process {pid}")

    def wait_reachable(self, timeout_s: float = 300.0) -> None:
        """Return once every host lets us in: a new TPU VM is ready some time before its SSH server and users are.

        Raises:
            HostsFailed, HostsRefused: some host did not, in time.
        """
        deadline = time.monotonic() + timeout_s
        waiting = [host.worker_id for host in self.hosts]
        while True:
            outcomes = self.run("true", waiting, timeout_s=30, check=False)
            waiting = [outcome.host.worker_id for outcome in outcomes if outcome.code != 0]
            if not waiting:
                return
            if time.monotonic() >= deadline:
                _checked(outcomes, f"logging in for {timeout_s:.0f} s")
            log.info("waiting for the SSH servers of workers %s", waiting)
            time.sleep(min(3.0, max(0.1, deadline - time.monotonic())))

    def _chosen(self, worker_ids: Iterable[int] | None) -> list[Host]:
        if worker_ids is None:
            return list(self.hosts)
        by_id = {host.worker_id: host for host in self.hosts}
        wanted = list(worker_ids)
        unknown = sorted(set(wanted) - set(by_id))
        if unknown:
            raise UserError(f"no workers {unknown}: there are {sorted(by_id)}")
        return [by_id[worker_id] for worker_id in wanted]


def kill_command(pid: int, started: int) -> str:
    """The shell command of `Pod.kill`. A process's name may hold spaces and brackets, so fields are counted behind it."""
    now = f"$(sed 's/.*) //' /proc/{pid}/stat 2>/dev/null | cut -d ' ' -f 20)"
    return f'[ "{now}" != {started} ] || kill -9 {pid}'


def _checked(outcomes: list[Outcome], doing: str) -> list[Outcome]:
    failed = [outcome for outcome in outcomes if outcome.code != 0]
    if not failed:
        return outcomes
    told = f"{doing}: {len(failed)} of {len(outcomes)} hosts failed"
    error = HostsRefused if all(outcome.refused for outcome in failed) else HostsFailed
    raise error("\n".join([told, *map(str, failed)]), outcomes)


def _short(command: Command) -> str:
    text = command if isinstance(command, str) else "the command"
    return text if len(text) <= 60 else f"{text[:57]}..."
