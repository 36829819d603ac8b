"""The memory of this machine that this process can still allocate.

On Linux, the kernel's estimate and the limits of control groups (cgroups, version 1 and 2). Elsewhere psutil, if it is
installed.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# below it are proc and the mounted control groups
ROOT = Path("/")

# of /proc/self/mountinfo: root and place of a mounted hierarchy, its version, and its controllers if that is 1
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- (cgroup2?) \S+ (\S+)$", re.MULTILINE)


class HostMemory(NamedTuple):
    """Memory that is left.

    Args:
        available: bytes.
        limit: what limits it, for a message.
        pool: the same text for all processes that share this memory.
    """

    available: int
    limit: str
    pool: str


class _Files(NamedTuple):
    """The files of a control group: its limits and its use in bytes, and the entries of memory.stat that the kernel
    frees on demand."""

    limits: tuple[str, ...]
    use: str
    freed: frozenset[str]


_VERSION_1 = _Files(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", frozenset({"total_inactive_file", "total_active_file"})
)
# a group above memory.high is not killed, but it is slowed down so much that it stands still
_VERSION_2 = _Files(
    ("memory.max", "memory.high"), "memory.current", frozenset({"inactive_file", "active_file", "slab_reclaimable"})
)


def available() -> HostMemory | None:
    """The least of the memory of the machine and of the control groups of this process. None: unknown."""
    if (machine := _of_machine()) is None:
        return None
    limits = [(machine, "this machine")]
    limits += [(left, f"the control group {folder}") for folder, left in _of_groups()]
    return HostMemory(*min(limits), _pool())


def _of_machine() -> int | None:
    """Bytes that can be allocated without swapping."""
    if match := re.search(r"^MemAvailable:\s+(\d+) kB$", _text("proc/meminfo"), re.MULTILINE):
        return int(match[1]) << 10
    try:
        return int(importlib.import_module("psutil").virtual_memory().available)
    except ImportError:
        return None


def _of_groups() -> Iterator[tuple[str, int]]:
    """(folder, bytes left) of each control group of this process that has a limit, innermost group first."""
    for mount, inside, files in _hierarchies():
        for folder in (inside, *inside.parents):
            if not folder.is_relative_to(mount):
                break
            limits = [limit for name in files.limits if (limit := _number(folder / name)) is not None]
            use = _number(folder / files.use)
            if limits and use is not None:
                yield str(folder), max(0, min(limits) - use + _freed(folder, files.freed))


def _hierarchies() -> Iterator[tuple[Path, Path, _Files]]:
    """The mounted hierarchies of control groups that count memory: the folder of the mount, and of this process."""
    groups = dict(re.findall(r"^\d+:(.*?):(.*)$", _text("proc/self/cgroup"), re.MULTILINE))
    of_memory = next((path for names, path in groups.items() if "memory" in names.split(",")), None)
    for fields in _MOUNT.findall(_text("proc/self/mountinfo")):
        root, mount, kind, options = map(_unescaped, fields)
        if kind == "cgroup2":
            path, files = groups.get(""), _VERSION_2
        elif "memory" in options.split(","):
            path, files = of_memory, _VERSION_1
        else:
            continue
        if path is None:
            continue
        # in a container only the group of the container may be mounted, while the path begins at the machine's root
        below = os.path.relpath(path, root)
        inside = Path(mount) if below.startswith("..") else Path(mount, below)
        yield Path(mount), inside, files


def _freed(group: Path, names: frozenset[str]) -> int:
    """The bytes in use that the kernel frees when a process needs them, such as the cache of files that were read."""
    entries = re.findall(r"^(\w+) (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return sum(int(value) for name, value in entries if name in names)


def _pool() -> str:
    machine = _text("proc/sys/kernel/random/boot_id").strip() or socket.gethostname()
    try:
        namespace = os.readlink(ROOT / "proc/self/ns/cgroup")
    except OSError:
        namespace = ""
    return "\n".join((machine, namespace, _text("proc/self/cgroup")))


def _unescaped(field: str) -> str:
    """A field of mountinfo, in which a space is \\040."""
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), field)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is no such file, or it says "max"."""
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: str | Path) -> str:
    """The text of a file under `ROOT`; empty if it cannot be read."""
    try:
        return (ROOT / str(path).lstrip("/")).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
