"""Unknown hosts are rejected before anything is sent to them. The host is a real SSH server on loopback."""

import contextlib
import dataclasses
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest
from support.waiting import LONG_S

from mesh_transformer.cloud.hosts import Access, Host, HostsRefused
from mesh_transformer.cloud.pod import Pod
from mesh_transformer.cloud.ssh import command_line

STRANGE = "100% \"of\" 'all' \\ hosts"


class Server(paramiko.ServerInterface):
    """Accepts every login, answers "hello" to every command, and records both."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.seen.append(f"login of {username}")
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.seen.append(command.decode())
        # after the reply to this request
        threading.Timer(0.3, self._answer, [channel]).start()
        return True

    def _answer(self, channel: paramiko.Channel) -> None:
        channel.sendall(b"hello\n")
        channel.send_exit_status(0)
        channel.close()


class Running:
    """A running server: its port, and the line of its public key in known_hosts."""

    def __init__(self, listener: socket.socket):
        self.server = Server()
        self._key = paramiko.RSAKey.generate(2048)
        self._listener = listener
        self.port = listener.getsockname()[1]
        self.line = f"[127.0.0.1]:{self.port} {self._key.get_name()} {self._key.get_base64()}\n"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            # the listener is closed
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self._key)
            # a client that rejects the key ends its connection in any state: the next one is served all the same
            with contextlib.suppress(paramiko.SSHException, EOFError, OSError):
                transport.start_server(server=self.server)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Running(listener)


@pytest.fixture
def access(running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Access:
    """A login with a new key, without any known host."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    running.server.seen.clear()
    paramiko.RSAKey.generate(2048).write_private_key_file(str(tmp_path / f"key {STRANGE}"))
    known = tmp_path / STRANGE
    known.write_text("")
    return Access(str(known), user="me", key_file=str(tmp_path / f"key {STRANGE}"), port=running.port)


def of_another_server(line: str) -> str:
    key = paramiko.RSAKey.generate(2048)
    return f"{' '.join(line.split()[:2])} {key.get_base64()}\n"


@pytest.mark.parametrize(
    ("known", "message"),
    [
        (lambda line: "", "its host key is not in .*: unknown hosts are rejected"),
        (of_another_server, "its host key differs from the one in"),
    ],
    ids=["unknown", "changed"],
)
def test_an_unknown_or_changed_host_is_rejected(running: Running, access: Access, known, message: str) -> None:
    path = Path(access.known_hosts)
    path.write_text(known(running.line))
    before = path.read_text()
    pod = Pod((Host(0, "127.0.0.1"),), access)
    with pytest.raises(HostsRefused, match=f"w0 \\(127.0.0.1\\): {message}"):
        pod.run("secret command")
    with pytest.raises(HostsRefused, match=message):
        pod.put(__file__, "target")
    if shutil.which("ssh"):
        done = _system_ssh(access)
        assert done.returncode == 255
        assert "Host key verification failed" in done.stderr
    assert running.server.seen == []
    assert path.read_text() == before, "a key was added"


def test_ctrl_c_does_not_wait_for_a_host_that_does_not_answer(access: Access) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        slow = dataclasses.replace(access, port=silent.getsockname()[1], connect_timeout_s=600)
        pod, began = Pod((Host(0, "127.0.0.1"),), slow), time.monotonic()
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pod.run("a command")
        assert time.monotonic() - began < 60


def test_a_known_host_is_accepted(running: Running, access: Access) -> None:
    """A control for the test above."""
    _reset(running.port)
    Path(access.known_hosts).write_text(running.line)
    (outcome,) = Pod((Host(0, "127.0.0.1"),), access).run("a command")
    assert (outcome.code, outcome.output) == (0, "hello\n")
    assert running.server.seen == ["login of me", "a command"]
    if shutil.which("ssh"):
        done = _system_ssh(access)
        assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def _reset(port: int) -> None:
    """Reset a connection (RST) during the exchange of keys, as a client may that rejects the server's key."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"SSH-2.0-test\r\n")
        lines = connection.makefile("rb")
        lines.readline()
        # the server's first packet
        lines.read(4)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        lines.close()


def _system_ssh(access: Access) -> subprocess.CompletedProcess[str]:
    command = [*command_line(Host(0, "127.0.0.1"), access), "a command"]
    return subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=LONG_S, check=False
    )
