"""The machine: Python, memory, cores, disks and ports."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mesh_transformer import cache_folders, environment, host_memory
from mesh_transformer.doctor.findings import Finding, ok, problem, warning
from mesh_transformer.errors import byte_size, plural

# training configs/tiny_shakespeare.json on one CPU device took 1.0 GB
LEAST_MEMORY = 2_000_000_000
# the compile cache takes up to 8 GiB (platforms.py), and a checkpoint is written beside the one before it
SMALL_DISK, FULL_DISK = 10_000_000_000, 1_000_000_000
# a cache of the hub may have a million files, on a slow disk
COUNT_S = 5.0
# the root of the file system, with the CPU limits of control groups
ROOT = Path("/")
PORTS = {
    5000: ("serve", "add --port 5001 to serve"),
    6379: ("a Ray cluster", "ray stop ends a cluster of your own; or ray start --head --port=6380"),
}
"""The default ports of commands: the command, and the mend if another program uses the port."""


def python() -> Iterator[Finding]:
    """The version of Python, and whether it is the one of the activated environment."""
    interpreter = f"{'.'.join(map(str, sys.version_info[:3]))} ({sys.executable})"
    if message := environment.without_assertions():
        yield problem(interpreter, message)
    elif environment.OLDEST <= sys.version_info[:2] <= environment.NEWEST:
        yield ok(interpreter)
    else:
        oldest, newest = (".".join(map(str, version)) for version in (environment.OLDEST, environment.NEWEST))
        yield problem(f"{interpreter}, but {oldest} to {newest} is needed", environment.way_in(wrong_python=True))
    activated = os.environ.get("VIRTUAL_ENV")
    if activated and os.path.realpath(activated) != os.path.realpath(sys.prefix):
        yield warning(
            f"the activated environment is {activated}, but this is Python of {sys.prefix}",
            f"use {activated}/bin/python",
        )


def memory() -> Iterator[Finding]:
    """The memory that a process can still allocate."""
    if (left := host_memory.available()) is None:
        yield ok("the free memory is not known on this system")
        return
    free = f"{byte_size(left.available)} free ({left.limit})"
    if left.available < LEAST_MEMORY:
        yield warning(f"{free}: the smallest config needs {byte_size(LEAST_MEMORY)}", "end other programs")
    else:
        yield ok(free)


def cores() -> Iterator[Finding]:
    """The cores that this process may use, and how busy they are."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    label, quota = plural(count, "core"), _quota()
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if quota is not None and quota < count:
        yield warning(
            f"{label}, but the control group allows the time of {quota:.3g}", "raise the limit: docker --cpus"
        )
    elif busy > 2 * count:
        yield warning(f"{label}, load {busy:.3g}: other programs take most of the time", "end other programs: top")
    else:
        yield ok(f"{label}, load {busy:.3g}")


def _quota() -> float | None:
    """The CPU limit of a container's control group, in cores; None: no limit, or version 1."""
    try:
        limit, period = (ROOT / "sys/fs/cgroup/cpu.max").read_text().split()
        return int(limit) / int(period)
    except (OSError, ValueError):
        return None


def folders() -> Iterator[Finding]:
    """The folders that commands write to: their sizes, and the free disk."""
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(cache_folders.hugging_face(), "hub")
    for name, folder, variable in (
        ("compiled programs", cache_folders.compiled_programs(), "JAX_COMPILATION_CACHE_DIR"),
        ("Hugging Face hub", hub, "HF_HOME"),
        ("caches of this program", os.path.dirname(cache_folders.own("compiled")), "XDG_CACHE_HOME"),
        ("temporary files", tempfile.gettempdir(), "TMPDIR"),
        ("this folder, for runs", os.getcwd(), ""),
    ):
        counted = variable not in ("", "TMPDIR")
        elsewhere = f"export {variable}=FOLDER of another disk" if variable else "work in a folder of another disk"
        yield _folder(f"{name}: {folder}", folder, elsewhere, counted=counted)


def _folder(name: str, folder: str, elsewhere: str, *, counted: bool) -> Finding:
    if folder.startswith("gs://"):
        return ok(f"{name}, in a bucket")
    disk = _existing(folder)
    if not (os.path.isdir(disk) and os.access(disk, os.W_OK)):
        return problem(f"{name} cannot be written", elsewhere)
    free = shutil.disk_usage(disk).free
    size = f" has {_size(folder)}," if counted else ","
    usage = f"{name}{size} {byte_size(free)} free"
    if free < FULL_DISK:
        return problem(usage, f"delete files, or {elsewhere}")
    return warning(usage, f"delete files, or {elsewhere}") if free < SMALL_DISK else ok(usage)


def _existing(folder: str) -> str:
    """The folder, or the first around it that exists."""
    folder = os.path.abspath(folder)
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def _size(folder: str) -> str:
    """The size of the files in a folder, each link as itself; a lower bound if they are too many to count."""
    total, end = 0, time.monotonic() + COUNT_S
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                # deleted in the meantime
                continue
        if time.monotonic() > end:
            return f"more than {byte_size(total)}"
    return byte_size(total)


def ports() -> Iterator[Finding]:
    """The ports that commands use by default: whether one can listen at them."""
    users = dict(PORTS)
    address, _, port = os.environ.get("JAX_COORDINATOR_ADDRESS", "").rpartition(":")
    if port.isdecimal() and os.environ.get("JAX_PROCESS_ID") == "0":
        users[int(port)] = (f"JAX's coordinator at {address}", "export JAX_COORDINATOR_ADDRESS with another port")
    free = []
    for port_number, (user, mend) in users.items():
        if _taken(port_number):
            yield warning(f"{port_number} ({user}) is taken by another program", mend)
        else:
            free.append(f"{port_number} ({user})")
    if free:
        yield ok(f"{', '.join(free)}: free")


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        # as the programs do: connections that were closed a moment ago do not count
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
        return False
