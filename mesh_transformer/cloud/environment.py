"""The Python environment of the hosts: a new one, or one that exists."""

import hashlib
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata

from mesh_transformer.cloud.archive import HASH_LENGTH, FolderArchive
from mesh_transformer.errors import UserError

# the name of this distribution
DISTRIBUTION = "mesh-transformer"


@dataclass(frozen=True)
class NewEnvironment:
    """A virtual environment that scripts/pod_setup.sh creates on each host, once for each content.

    Every package has the version of the driver's environment. Ray needs the same Ray and Python on all machines, and
    the hosts' jax is then the one that was tested on the driver.

    Args:
        requirements: local file.
        extra: further requirements.
        wheelhouse: local folder of wheels, for hosts without internet; None: pip uses a package index.
        python: a version, or a path on the hosts.
    """

    requirements: str = "requirements.txt"
    extra: tuple[str, ...] = ("jax[tpu]",)
    wheelhouse: str | None = None
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}"

    @cached_property
    def requirement_lines(self) -> str:
        """The text of the requirements file for the hosts.

        Raises:
            UserError: `requirements` does not exist.
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
        """Identifies the environment. `script` is the text of pod_setup.sh."""
        wheels = self.wheels.hash if self.wheels is not None else ""
        parts = (self.requirement_lines, pins(), wheels, self.python, script)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:HASH_LENGTH]


@dataclass(frozen=True)
class ExistingEnvironment:
    """An environment that exists on the hosts, in `folder`, with all packages."""

    folder: str

    def __post_init__(self) -> None:
        if not os.path.isabs(self.folder):
            raise UserError(f"the hosts' environment {self.folder!r}: give its absolute path")


HostEnvironment = NewEnvironment | ExistingEnvironment


def pins() -> str:
    """The text of a pip constraints file with the version of each distribution in the environment of this process.

    Local versions (1.2+cpu) are left out, because package indexes do not have them.
    """
    versions = {
        (name.lower().replace("_", "-"), distribution.version)
        for distribution in metadata.distributions()
        if (name := distribution.metadata["Name"])
    }
    lines = [
        f"{name}=={version}\n" for name, version in sorted(versions) if "+" not in version and name != DISTRIBUTION
    ]
    return "".join(lines)
