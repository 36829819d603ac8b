"""Archives for the hosts, each with a hash of its content as its name."""

import gzip
import hashlib
import io
import logging
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO

from mesh_transformer.environment import CHECKOUT
from mesh_transformer.errors import UserError, listed

log = logging.getLogger(__name__)
# the parts of a checkout that hosts need, besides *.py at the top
CODE = ("mesh_transformer", "configs", "scripts", "data", "pyproject.toml", "requirements.txt")
MAX_BYTES = 256 << 20
HASH_LENGTH = 16


@dataclass(frozen=True)
class Archive:
    """A .tar.gz. Equal trees give equal bytes."""

    content: bytes
    hash: str

    def write(self, file: IO[bytes]) -> None:
        """Write it to a file."""
        file.write(self.content)


@dataclass(frozen=True)
class FolderArchive:
    """A .tar of the files directly in a folder, such as wheels. They may have gigabytes and are compressed already.

    Raises:
        UserError: there is no such folder.
    """

    folder: str

    def __post_init__(self) -> None:
        if not os.path.isdir(self.folder):
            raise UserError(f"no folder {self.folder}: give an existing one")

    @cached_property
    def hash(self) -> str:
        """A hash of the names and contents of the files."""
        digest = hashlib.sha256()
        for name in self._names():
            with open(os.path.join(self.folder, name), "rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{name}\0{content}\0".encode())
        return digest.hexdigest()[:HASH_LENGTH]

    def write(self, file: IO[bytes]) -> None:
        """Write it to a file."""
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in self._names():
                tar.add(os.path.join(self.folder, name), name)

    def _names(self) -> list[str]:
        return sorted(name for name in os.listdir(self.folder) if os.path.isfile(os.path.join(self.folder, name)))


def code_archive(root: str = CHECKOUT) -> Archive:
    """An archive of the code below `root`: the package, the entry points, configs, scripts and small data.

    Args:
        root: a checkout, or the folder in which the package is installed. Both give an archive in the form of a
            checkout.

    Raises:
        UserError: `root` has no package, its `data` is too large, or a link leads out of it.

    Files that git does not track are sent too, and a log line names them.
    """
    if not os.path.isdir(os.path.join(root, "mesh_transformer")):
        raise UserError(f"{root} has no folder mesh_transformer: give the root of a checkout")
    if (shipped := beside(root)) != root:
        # other packages lie beside the package
        ours = [path for path in _files(root, "mesh_transformer") if not path.startswith("mesh_transformer/shipped/")]
        others = [path for name in sorted(os.listdir(shipped)) for path in _files(shipped, name)]
        return pack({**dict.fromkeys(ours, root), **dict.fromkeys(others, shipped)})
    names = sorted(name for name in os.listdir(root) if name in CODE or name.endswith(".py"))
    paths = [path for name in names for path in _files(root, name)]
    if untracked := _untracked(root, paths):
        log.info("the code for the hosts has files that git does not track: %s", listed(untracked, 10))
    return pack(dict.fromkeys(paths, root))


def _untracked(root: str, paths: Sequence[str]) -> list[str]:
    """Those of the paths that git does not track; empty where it does not know the folder."""
    try:
        done = subprocess.run(["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    tracked = set(done.stdout.split("\0"))
    return [path for path in paths if path not in tracked] if done.stdout else []


def beside(root: str) -> str:
    """The folder with configs, data, scripts and requirements.txt: `root`, or a folder of an installed package."""
    shipped = os.path.join(root, "mesh_transformer", "shipped")
    return shipped if os.path.isdir(shipped) else root


def pack(roots: Mapping[str, str], max_bytes: int = MAX_BYTES) -> Archive:
    """An archive of files, without owners and times.

    Args:
        roots: the folder of each file, by the path of the file in the folder, which is its name in the archive.

    Raises:
        UserError: the files have more than `max_bytes`.
    """
    size = sum(os.path.getsize(os.path.join(root, path)) for path, root in roots.items())
    if size > max_bytes:
        raise UserError(
            f"the code has {size >> 20} MiB, more than the limit of {max_bytes >> 20} MiB: put large data "
            "in a bucket (gs://)"
        )
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w", dereference=True) as tar:
        for path, root in roots.items():
            tar.add(os.path.join(root, path), path, filter=_anonymous)
    digest = hashlib.sha256(plain.getvalue()).hexdigest()[:HASH_LENGTH]
    return Archive(gzip.compress(plain.getvalue(), compresslevel=6, mtime=0), digest)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    mode = 0o755 if entry.mode & 0o111 else 0o644
    return entry.replace(mode=mode, mtime=0, uid=0, gid=0, uname="", gname="", deep=False)


def _files(root: str, name: str) -> Iterator[str]:
    full = os.path.join(root, name)
    _check_inside(root, name)
    if os.path.isfile(full):
        yield name
        return
    for folder, folders, names in os.walk(full):
        folders[:] = sorted(entry for entry in folders if not entry.startswith((".", "__pycache__")))
        for entry in folders:
            _check_inside(root, os.path.relpath(os.path.join(folder, entry), root))
        for entry in sorted(names):
            if not entry.startswith(".") and not entry.endswith(".pyc"):
                path = os.path.relpath(os.path.join(folder, entry), root)
                _check_inside(root, path)
                yield path


def _check_inside(root: str, path: str) -> None:
    """Refuse a link out of `root`: whatever it leads to would be readable on the hosts."""
    target = os.path.realpath(os.path.join(root, path))
    if not target.startswith(os.path.join(os.path.realpath(root), "")):
        raise UserError(
            f"{os.path.join(root, path)} is a link to {target}, and the hosts get only what lies in {root}: replace "
            "the link, or put large data in a bucket (gs://)"
        )
