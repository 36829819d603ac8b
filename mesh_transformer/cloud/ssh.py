"""SSH to many hosts at once: one thread a host, fabric in each. What goes wrong on a host becomes its `Outcome`."""

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from mesh_transformer.cloud import shell
from mesh_transformer.cloud.pod import Access, Command, Host, Outcome
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)
MOST_AT_ONCE = 64
DROPPED = -1  # paramiko's exit code of a command whose connection ended before the command did
Action = Callable[[Any, Host], Outcome]


def run(
    hosts: list[Host], access: Access, command: Command, *, timeout_s: float | None, echo: bool
) -> list[Outcome]:
    """Run a command on each host and wait; the outcomes are in the order of `hosts`."""

    def action(connection: Any, host: Host) -> Outcome:
        line = command if isinstance(command, str) else command(host)
        return _run(connection, host, line, timeout_s, echo=echo)

    return _everywhere(hosts, access, action)


def put(hosts: list[Host], access: Access, source: str, target: str) -> list[Outcome]:
    """Copy a local file to each host, under another name until it is whole."""

    def action(connection: Any, host: Host) -> Outcome:
        part = f"{target}.{secrets.token_hex(4)}.part"
        connection.put(source, part)
        return _run(connection, host, shell.join("mv", "-f", "--", part, target), 60.0, echo=False)

    return _everywhere(hosts, access, action)


def get(hosts: list[Host], access: Access, source: str, target: Callable[[Host], str]) -> list[Outcome]:
    """Copy a file of each host to its own local path."""

    def action(connection: Any, host: Host) -> Outcome:
        os.makedirs(os.path.dirname(target(host)), exist_ok=True)
        connection.get(source, target(host))
        return Outcome(host, 0)

    return _everywhere(hosts, access, action)


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


def _everywhere(hosts: list[Host], access: Access, action: Action) -> list[Outcome]:
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
        _notice_silence(connection.transport, access.silence_s)
        yield connection
    finally:
        connection.close()


def _notice_silence(transport: Any, silence_s: float) -> None:
    """Packets that nobody confirms end the connection: without this, a vanished network is noticed after minutes."""
    transport.set_keepalive(max(1, int(silence_s / 3)))
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
    if option is not None:
        transport.sock.setsockopt(socket.IPPROTO_TCP, option, int(silence_s * 1000))


def _run(connection: Any, host: Host, command: str, timeout_s: float | None, *, echo: bool) -> Outcome:
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
        refusal = (
            f"its host key is not the one in {access.known_hosts}: another machine may have taken its address; if the TPU was "
            "made again, remove the old line"
        )
    elif isinstance(error, paramiko.AuthenticationException):
        keys = " or ".join(access.key_files()) or "the keys of the SSH agent"
        refusal = f"it does not let {access.user} in with {keys}: {error}"
    elif isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        refusal = f"its host key is not in {access.known_hosts}: unknown hosts are refused (docs/pod.md says how keys are learned)"
    else:
        return Outcome(host, None, fault=f"{type(error).__name__}: {error}".removesuffix(": "))
    return Outcome(host, None, fault=refusal, refused=True)
