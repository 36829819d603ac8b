"""SSH connections to one host: through fabric, and through the system's ssh for a terminal."""

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mesh_transformer.cloud.hosts import Access, Host, Outcome
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)
# paramiko's exit code for a command whose connection was lost
DROPPED = -1


@contextmanager
def connected(host: Host, access: Access, begin: Callable[[Any], None]) -> Iterator[Any]:
    """An open `fabric.Connection`. `begin` gets it before it opens, so that another thread can close it."""
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
    # fabric's default accepts any host
    connection.client.set_missing_host_key_policy(paramiko.RejectPolicy())
    begin(connection)
    try:
        connection.open()
        # unconfirmed packets end the connection; otherwise a lost network is noticed after minutes
        connection.transport.set_keepalive(max(1, int(access.silence_s / 3)))
        # Linux only
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            silence_ms = int(access.silence_s * 1000)
            connection.transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_ms)
        yield connection
    finally:
        connection.close()


def run(connection: Any, host: Host, command: str, timeout_s: float | None, *, echo: bool = False) -> Outcome:
    """Run a shell command.

    Args:
        timeout_s: None: no limit.
        echo: log each line of output as it arrives.
    """
    # of both streams, in order of arrival
    lines: list[str] = []
    error = None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        connection.client.close()

    def take(line: str) -> None:
        lines.append(line)
        if echo:
            log.info("%s| %s", host.name, line.rstrip("\n"))

    out, err = _LineStream(take), _LineStream(take)
    settings = {"hide": False, "warn": True, "in_stream": False, "encoding": "utf-8"}
    # not fabric's limit: it asks whether its timer has ended, and under load that timer is still sending
    timer = threading.Timer(threading.TIMEOUT_MAX if timeout_s is None else timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        code = connection.run(command, out_stream=out, err_stream=err, **settings).exited
    except Exception:
        if not expired.is_set():
            raise
        code = DROPPED
    finally:
        timer.cancel()
        timer.join()
    if code == DROPPED:
        reason = f"not done after {timeout_s:g} s" if expired.is_set() else "the connection was dropped"
        code, error = None, f"{reason}; the command may still be running there"
    out.finish()
    err.finish()
    return Outcome(host, code, "".join(lines), error)


def outcome_of(error: Exception, host: Host, access: Access) -> Outcome:
    """The outcome of a command that ended with an exception."""
    import paramiko

    if isinstance(error, UserError):
        refusal = str(error)
    elif isinstance(error, paramiko.BadHostKeyException):
        refusal = (
            f"its host key differs from the one in {access.known_hosts}: it may be another machine; if the TPU was "
            "created again, remove the old line"
        )
    elif isinstance(error, paramiko.AuthenticationException):
        keys = " or ".join(access.key_files()) or "the keys of the SSH agent"
        refusal = f"it does not accept user {access.user} with {keys}: {error}"
    elif isinstance(error, paramiko.SSHException) and "not found in known_hosts" in str(error):
        refusal = (
            f"its host key is not in {access.known_hosts}: unknown hosts are rejected (docs/pod.md explains the source "
            "of the keys)"
        )
    else:
        return Outcome(host, None, error=f"{type(error).__name__}: {error}".removesuffix(": "))
    return Outcome(host, None, error=refusal, refused=True)


def command_line(host: Host, access: Access) -> list[str]:
    """The command of the system's ssh for one host, with the same rules."""
    keys = [f"IdentityFile={_quoted(path)}" for path in access.key_files()]
    options = [
        *keys, *(["IdentitiesOnly=yes"] if keys else []), "StrictHostKeyChecking=yes",
        f"UserKnownHostsFile={_quoted(access.known_hosts)}", "GlobalKnownHostsFile=/dev/null",
        f"ConnectTimeout={access.connect_timeout_s:.0f}", "ServerAliveInterval=5", "ServerAliveCountMax=3",
    ]  # fmt: skip
    arguments = [part for option in options for part in ("-o", option)]
    return ["ssh", "-F", "/dev/null", "-p", str(access.port), *arguments, f"{access.user}@{host.address}"]


def _quoted(path: str) -> str:
    """A path as a value of an ssh option, which ssh neither splits nor expands."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


class _LineStream:
    """A text stream that passes complete lines to a function."""

    encoding = "utf-8"

    def __init__(self, take: Callable[[str], None]):
        self._take, self._rest = take, ""

    def write(self, text: str) -> None:
        lines = (self._rest + text).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith("\n") else ""
        for line in lines:
            self._take(line)

    def flush(self) -> None:
        """Does nothing: only an incomplete line is buffered."""

    def finish(self) -> None:
        """Pass the incomplete last line."""
        if self._rest:
            self._take(self._rest)
