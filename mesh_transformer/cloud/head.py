"""The head of the Ray cluster, on the driver's machine. It outlives the driver, so that a new driver finds it."""

import contextlib
import hashlib
import json
import logging
import os
import secrets
import subprocess
import sys
from dataclasses import dataclass

from mesh_transformer import cache_folders, ray_join
from mesh_transformer.environment import SHIPPED
from mesh_transformer.errors import RunError, UserError

log = logging.getLogger(__name__)
TOKEN = "ray_token"
# a node without an answer for 5 to 8 s counts as dead; with Ray's defaults this takes more than a minute
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}
# of the head and of every node. No driver asks Ray for the output of its processes, so none has to read their logs
NODE_OPTIONS = ("--disable-usage-stats", "--include-log-monitor=false")
# longer than pod_ray.sh takes at most, without a worker that saves
START_S = 330.0
# Ray makes the folder of its sessions mode 777, so it lies in one that other users cannot enter. Hosts take the head's
# path, and a TMPDIR of the driver need not exist there. The path is short: Ray's sockets lie 64 characters below it,
# and the path of a socket has at most 107.
TEMPORARY = "/tmp"


@dataclass(frozen=True)
class Head:
    """A running head.

    Args:
        address: address:port.
        folder: the folder of its state, log and token.
    """

    address: str
    folder: str

    @property
    def token_file(self) -> str:
        """The file with the token that every node and driver needs."""
        return os.path.join(self.folder, TOKEN)

    def environment(self) -> dict[str, str]:
        """Environment variables that a process needs before it imports ray."""
        return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self.token_file}


def start(folder: str, address: str, port: int = 6379, arguments: tuple[str, ...] = ()) -> Head:
    """Start the head on this machine, or find the running one.

    Args:
        folder: the folder of its state; it identifies the head.
        address: address of this machine for the hosts.
        port: port for the hosts.
        arguments: further arguments of `ray start`.

    Raises:
        UserError: Ray is not installed in the environment of this Python, or is too old; or another user can enter the
            folder of Ray's sessions.
        RunError: the head did not start.
    """
    ray_join.check_version()
    folder = os.path.abspath(folder)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    head = Head(f"{address}:{port}", folder)
    _create_token(head.token_file)
    os.close(cache_folders.open_temporary(TEMPORARY))
    sessions = os.path.join(cache_folders.temporary(TEMPORARY), "ray")
    command = [
        _ray(), "start", "--head", f"--node-ip-address={address}", f"--port={port}", "--include-dashboard=false",
        *NODE_OPTIONS, "--num-cpus=0", f"--temp-dir={sessions}",
        f"--system-config={json.dumps(HEALTH_CHECKS)}", *arguments,
    ]  # fmt: skip
    token = read_token(head.token_file)
    fingerprint = hashlib.sha256(f"{command}{token}".encode()).hexdigest()[:16]
    output = _script("start", folder, fingerprint, *command, environment=head.environment())
    log.info("Ray head %s: %s", head.address, output)
    return head


def stop(folder: str) -> None:
    """Stop the head with its state in `folder`. It is no error if none runs."""
    _script("stop", os.path.abspath(folder))


def read_token(path: str) -> str:
    """The token in a file.

    Raises:
        UserError: there is no such file.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except FileNotFoundError as error:
        raise UserError(f"no file {path} with the token of the Ray cluster: start the head first") from error


def _create_token(path: str) -> None:
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))


def _ray() -> str:
    path = os.path.join(os.path.dirname(sys.executable), "ray")
    if not os.path.exists(path):
        raise UserError(f"no {path}: install requirements.txt in this environment")
    return path


def _script(verb: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    command = ["bash", os.path.join(SHIPPED, "scripts", "pod_ray.sh"), verb, *arguments]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=START_S, check=False)
    if done.returncode != 0:
        raise RunError(f"the Ray head did not {verb}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()
