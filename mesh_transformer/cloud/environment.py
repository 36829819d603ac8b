"""The Python environment of the hosts: what goes in, and the hash that says whether it is there already."""

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

from mesh_transformer.cloud.archive import HASH_LETTERS, FolderArchive
from mesh_transformer.errors import UserError

OWN = "mesh-transformer"


@dataclass(frozen=True)
class Environment:
    """One virtual environment, made on each host by scripts/pod_setup.sh, once for each content.

    Every version is pinned to the driver's own: Ray wants the same Ray and Python on all machines, and the hosts' jax is the
    one that was tested here.
    """

    requirements: str = "requirements.txt"  # local file
    extra: tuple[str, ...] = ("jax[tpu]",)  # further requirements
    # local folder of wheels: for hosts without internet, which then ask for nothing
    wheelhouse: str | None = None
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"  # a version, or a path on the hosts

    @cached_property
    def requirement_lines(self) -> str:
        """The requirements file for the hosts.

        Raises:
            UserError: `requirements` is not there.
        """
        try:
            with open(self.requirements, encoding="utf-8") as file:
                return "\n".join([file.read(), *self.extra, ""])
        except FileNotFoundError as error:
            raise UserError(f"no requirements file {self.requirements}") from error

    @cached_property
    def wheels(self) -> FolderArchive | None:
        """The wheelhouse as an archive."""
        return FolderArchive(self.wheelhouse) if self.wheelhouse is not None else None

    def hash(self, script: str) -> str:
        """Names the environment that `script` (the text of pod_setup.sh) makes of this."""
        wheels = self.wheels.hash if self.wheels is not None else ""
        parts = (self.requirement_lines, pins(), wheels, self.python, script)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:HASH_LETTERS]


@dataclass(frozen=True)
class Existing:
    """An environment that the hosts have already, with all that is needed."""

    folder: str  # on the hosts

    def __post_init__(self) -> None:
        if not os.path.isabs(self.folder):
            raise UserError(f"the hosts' environment {self.folder!r}: give its whole path")


Python = Environment | Existing


def pins() -> str:
    """A pip constraints file: the version of each distribution in this process's environment.

    Local versions (1.2+cpu) are left out: package indexes have none of them.
    """
    found = {
        (name.lower().replace("_", "-"), distribution.version)
        for distribution in metadata.distributions()
        if (name := distribution.metadata["Name"])
    }
    lines = [f"{name}=={version}\n" for name, version in sorted(found) if "+" not in version and name != OWN]
    return "".join(lines)
