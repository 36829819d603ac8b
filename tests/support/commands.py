"""Runs the entry points as a user does: real processes, real files."""

import contextlib
import functools
import ipaddress
import itertools
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.fork_server import Forked, ForkServer
from support.waiting import until
from support.xla import cpu_flags

REPO = Path(__file__).parents[2]
# the working folder for a program that imports `support`
TESTS = REPO / "tests"

_PIPES: Any = {"text": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

# byte tokens of a text file, with validation, accumulation and shuffling; small enough to compile in seconds
CONFIG: dict[str, Any] = {
    "model": {"layers": 2, "d_model": 32, "n_heads": 4, "n_vocab": 257, "seq": 32, "pe_rotary_dims": 8},
    "optimizer": {
        "lr": 1e-2, "end_lr": 1e-3, "warmup_steps": 5, "anneal_steps": 100, "total_steps": 12,
        "gradient_accumulation_steps": 2,
    },
    "data": {
        "train_set": "text.txt", "val_set": {"held": "text.txt"}, "tokenizer": "bytes", "batch_size": 8,
        "shuffle": True,
        "val_every": 5, "val_batches": 2,
    },
    "checkpoint": {"model_dir": "run", "ckpt_every": 5, "keep_every": 5},
    # tensorboardX imports torch where that is installed: three seconds of CPU for each process; Matplotlib takes one
    "logging": {"tensorboard": False, "plot": False},
}  # fmt: skip


def write_run(folder: Path, **groups: dict[str, Any]) -> Path:
    """Write a text and `config.json`, which is CONFIG with changes, into a folder. Returns the path of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall, {i * i}.\n" for i in range(500)))
    config = {group: {**values, **groups.get(group, {})} for group, values in CONFIG.items()}
    config |= {group: values for group, values in groups.items() if group not in CONFIG}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def start(
    program: str, *arguments: str, cwd: Path, devices: int = 1, fresh: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Start an entry point of the project on forced CPU devices, with its output captured.

    Args:
        fresh: in a new interpreter. Otherwise a fork of a process that has imported the project, where it is the same.
    """
    env = {**own_environment(dict(os.environ), devices), "XDG_CACHE_HOME": str(cwd / "cache"), **environment}
    command = [sys.executable, str(REPO / program), *arguments]
    options = {"cwd": cwd, "env": env, **_PIPES}
    if not fresh and sys.platform == "linux" and (server := fork_server()).can_start(command[1], env):
        return Forked(server, command, **options)
    return subprocess.Popen(command, **options)


def start_python(
    program: str, *arguments: str, cwd: Path, devices: int = 1, **environment: str
) -> subprocess.Popen[str]:
    """Start the text of a Python program as `start` does."""
    env = {**own_environment(dict(os.environ), devices), "XDG_CACHE_HOME": str(cwd / "cache"), **environment}
    return subprocess.Popen([sys.executable, "-c", program, *arguments], cwd=cwd, env=env, **_PIPES)


def run_python(program: str, *arguments: str, cwd: Path, code: int = 0, **options: Any) -> tuple[str, str]:
    """Run the text of a Python program to its end. The options are those of `start_python`. Returns as `run`."""
    return finish(start_python(program, *arguments, cwd=cwd, **options), code)


def own_environment(inherited: dict[str, str], devices: int) -> dict[str, str]:
    # commands store all programs that they compile
    inherited.pop("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", None)
    return {**inherited, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": cpu_flags(devices), "HF_HUB_OFFLINE": "1"}


# as conftest.py made it: a test that changes it must not have the server that others use
_ENVIRONMENT = own_environment(dict(os.environ), 1)


def fork_server() -> ForkServer:
    """The server of this process in its network: a pod has another one (support/hosts.py)."""
    return _server_of(os.readlink("/proc/thread-self/ns/net"))


@functools.cache
def _server_of(network: str) -> ForkServer:
    return ForkServer(_ENVIRONMENT)


def finish(process: subprocess.Popen[str], code: int = 0, timeout_s: float = 300) -> tuple[str, str]:
    """Wait for the end. Returns standard output and standard error, and shows them if the exit code differs from
    `code`."""
    output, errors = process.communicate(timeout=timeout_s)
    assert process.returncode == code, f"exit code {process.returncode}, not {code}\n{output}\n{errors[-4000:]}"
    return output, errors


def run(program: str, *arguments: str, cwd: Path, code: int = 0, **options: Any) -> tuple[str, str]:
    """Run an entry point to its end. The options are those of `start`."""
    return finish(start(program, *arguments, cwd=cwd, **options), code)


def metrics(folder: Path, *, running: bool = False) -> list[dict[str, Any]]:
    """The records of a run's metrics file. Every line must be complete, except for the last line of a `running` run."""
    text = (folder / "metrics.jsonl").read_text()
    if running:
        text = text[: text.rfind("\n") + 1]
    return [json.loads(line) for line in text.splitlines()]


def wait_for_step(process: subprocess.Popen[str], folder: Path, step: int) -> None:
    """Return as soon as the metrics file has a record of `step`."""
    path, record = folder / "metrics.jsonl", f'"step": {step},'
    until(
        lambda: path.exists() and any(record in line for line in path.read_text().splitlines()[-50:]),
        process,
        shown=lambda: process.communicate()[1][-4000:] if process.poll() is not None else "",
    )


# Below the ports that the kernel gives to connections. Each worker of pytest has its own thousand.
_FIRST_PORT = 10_000 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw"))
_PORTS = (_FIRST_PORT + (os.getpid() + number) % 1000 for number in itertools.count())


def free_port() -> int:
    """A port of the loopback interface that is free, and that no other test of this run takes."""
    for port in itertools.islice(_PORTS, 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no port from {_FIRST_PORT} on is free")


def listens_at(pid: int, port: int) -> set[str]:
    """The addresses at which a process listens on a TCP port, from /proc."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        # a file may be closed meanwhile
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[i] for i in (1, 3, 9))
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port and f"socket:[{inode}]" in sockets:
                words = b"".join(bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8))
                listening = ipaddress.ip_address(words)
                found.add(str(getattr(listening, "ipv4_mapped", None) or listening))
    return found
