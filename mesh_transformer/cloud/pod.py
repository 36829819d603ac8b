"""The hosts of a TPU slice, and what can be done on all of them at once over SSH: one thread a host, fabric in each.

What goes wrong on a host becomes its `Outcome`.
"""

import getpass
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mesh_transformer.cloud import shell
from mesh_transformer.errors import RunError, UserError

log = logging.getLogger(__name__)
KEY_FILES = ("~/.ssh/google_compute_engine", "~/.ssh/id_ed25519", "~/.ssh/id_rsa")
SHOWN_LINES = 8  # of a failed host's output in the error
MOST_AT_ONCE = 64
DROPPED = -1  # paramiko's exit code of a command whose connection ended before the command did


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
Action = Callable[[Any, Host], Outcome]


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

        def action(connection: Any, host: Host) -> Outcome:
            line = command if isinstance(command, str) else command(host)
            return _run(connection, host, line, timeout_s, echo=echo)

        outcomes = self._everywhere(action, hosts)
        return _checked(outcomes, doing or _short(command)) if check else outcomes

    def put(self, source: str, target: str, hosts: Iterable[int] | None = None) -> None:
        """Copy a local file to the hosts; `target` is relative to the home folder, and appears whole or not at all.

        Raises:
            HostsFailed, HostsRefused: some host did not get it.
        """

        def action(connection: Any, host: Host) -> Outcome:
            part = f"{target}.{secrets.token_hex(4)}.part"
            connection.put(source, part)
            return _run(connection, host, shell.join("mv", "-f", "--", part, target), 60.0)

        _checked(self._everywhere(action, hosts), f"copying {source}")

    def get(self, source: str, target: Callable[[Host], str], hosts: Iterable[int] | None = None) -> None:
        """Copy a file of each host to the local path `target(host)`.

        Raises:
            HostsFailed, HostsRefused: some host could not give it.
        """

        def action(connection: Any, host: Host) -> Outcome:
            os.makedirs(os.path.dirname(target(host)), exist_ok=True)
            connection.get(source, target(host))
            return Outcome(host, 0)

        _checked(self._everywhere(action, hosts), f"fetching {source}")

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

    def _everywhere(self, action: Action, worker_ids: Iterable[int] | None) -> list[Outcome]:
        """The outcomes are in the order of `_chosen`."""
        hosts, access = self._chosen(worker_ids), self.access
        if not os.path.isfile(access.known_hosts):
            raise UserError(f"no file of known hosts {access.known_hosts}: unknown hosts are refused")
        open_connections: list[Any] = []
        interrupted = threading.Event()

        def work(host: Host) -> Outcome:
            try:
                with _connected(host, access) as connection:
                    open_connections.append(connection)
                    if interrupted.is_set():
                        return Outcome(host, None, fault="interrupted")
                    return action(connection, host)
            except Exception as error:  # noqa: BLE001  (whatever a host brings about is told with its name, beside the others')
                return _outcome_of(error, host, access)

        with ThreadPoolExecutor(max_workers=min(len(hosts), MOST_AT_ONCE) or 1) as pool:
            futures = [pool.submit(work, host) for host in hosts]
            try:
                return [future.result() for future in futures]
            except BaseException:  # Ctrl-C: let the threads end; what they started on the hosts may go on
                interrupted.set()
                pool.shutdown(wait=False, cancel_futures=True)
                while not all(future.done() for future in futures):
                    for connection in list(open_connections):  # again: fabric opens what it finds closed
                        connection.close()
                    time.sleep(0.1)
                raise


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


def command_line(host: Host, access: Access) -> list[str]:
    """The system's ssh for one host, under the same rules."""
    keys = [f"IdentityFile={_literal(path)}" for path in access.key_files()]
    options = [
        *keys, *(["IdentitiesOnly=yes"] if keys else []), "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={_literal(access.known_hosts)}", "GlobalKnownHostsFile=/dev/null",
        f"ConnectTimeout={access.connect_timeout_s:.0f}", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    ]  # fmt: skip
    given = [part for option in options for part in ("-o", option)]
    return ["ssh", "-F", "/dev/null", "-p", str(access.port), *given, f"{access.user}@{host.address}"]


def _literal(path: str) -> str:
    """A path as a value of an option of ssh, which neither splits it nor replaces anything in it."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


@contextmanager
def _connected(host: Host, access: Access) -> Iterator[Any]:
    import fabric
    import paramiko

    keys = access.key_files()
    connection = fabric.Connection(
        host.address,
        user=access.user,
        port=access.port,
        config=fabric.Config(overrides={"load_ssh_configs": False}),
        connect_timeout=access.connect_timeout_s,
        connect_kwargs={
            "key_filename": keys,
            "look_for_keys": False,
            "allow_agent": access.key_file is None,
            "banner_timeout": access.connect_timeout_s,
            "auth_timeout": access.connect_timeout_s,
        },
    )
    connection.client.load_host_keys(access.known_hosts)
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())  # fabric's own accepts any host
    try:
        connection.open()
        # packets that nobody confirms end the connection: else a vanished network is noticed after minutes
        connection.transport.set_keepalive(max(1, int(access.silence_s / 3)))
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            silence_ms = int(access.silence_s * 1000)
            connection.transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
        yield connection
    finally:
        connection.close()


def _run(
    connection: Any, host: Host, command: str, timeout_s: float | None, *, echo: bool = False
) -> Outcome:
    from invoke.exceptions import CommandTimedOut

    lines: list[str] = []  # of both streams, in their order
    fault = None

    def take(line: str) -> None:
        lines.append(line)
        if echo:
            log.info("w%d| %s", host.worker_id, line.rstrip("\n"))

    out, err = _Stream(take), _Stream(take)
    settings = {"hide": False, "warn": True, "in_stream": False, "encoding": "utf-8"}
    try:
        code = connection.run(command, out_stream=out, err_stream=err, timeout=timeout_s, **settings).exited
    except CommandTimedOut:
        code, fault = None, f"not done after {timeout_s:g} s; it may still be running there"
    if code == DROPPED:
        code, fault = None, "the connection was dropped; the command may still be running"
    out.finish()
    err.finish()
    return Outcome(host, code, "".join(lines), fault)


class _Stream:
    """A text stream that gives whole lines away."""

    encoding = "utf-8"

    def __init__(self, take: Callable[[str], None]):
        self._take, self._rest = take, ""

    def write(self, text: str) -> None:
        lines = (self._rest + text).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith("\n") else ""
        for line in lines:
            self._take(line)

    def flush(self) -> None:
        """Nothing is held back but unfinished lines."""

    def finish(self) -> None:
        """Give the unfinished line away."""
        if self._rest:
            self._take(self._rest)


def _outcome_of(error: Exception, host: Host, access: Access) -> Outcome:
    import paramiko

    if isinstance(error, UserError):
        refusal = str(error)
    elif isinstance(error, paramiko.BadHostKeyException):
        refusal = f"its host key is not the one in {access.known_hosts}: another machine may be there; if the TPU was made again, remove the old line"
    elif isinstance(error, paramiko.AuthenticationException):
        keys = " or ".join(access.key_files()) or "the keys of the SSH agent"
        refusal = f"it does not let {access.user} in with {keys}: {error}"
    elif isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        refusal = f"its host key is not in {access.known_hosts}: unknown hosts are refused (docs/pod.md says how keys are learned)"
    else:
        return Outcome(host, None, fault=f"{type(error).__name__}: {error}".removesuffix(": "))
    return Outcome(host, None, fault=refusal, refused=True)
