"""The hosts of a TPU: their addresses, the login on them, and the outcome of a command on each."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh_transformer.errors import RunError, UserError, shown

KEY_FILES = ("~/.ssh/google_compute_engine", "~/.ssh/id_ed25519", "~/.ssh/id_rsa")
# lines of a failed host's output in an error message
SHOWN_LINES = 8


@dataclass(frozen=True)
class Host:
    """One machine of a TPU.

    Args:
        worker_id: TPU worker ID, which is the index among the slice's network endpoints. With several slices it
            counts over all of them.
        slice_id: index of its slice among several; None for one slice.
    """

    worker_id: int
    address: str
    slice_id: int | None = None

    @property
    def name(self) -> str:
        """A short name for messages."""
        return f"w{self.worker_id}" if self.slice_id is None else f"w{self.worker_id} of slice {self.slice_id}"

    def __str__(self) -> str:
        return f"{self.name} ({self.address})"


@dataclass(frozen=True)
class Access:
    """The login on the hosts.

    Args:
        known_hosts: file with the hosts' public keys by address, in the format of OpenSSH. Other hosts are rejected.
        key_file: private key; None: the SSH agent, and the first file of KEY_FILES that exists.
        silence_s: a connection without confirmed packets for this time is closed.
    """

    known_hosts: str
    user: str = field(default_factory=getpass.getuser)
    key_file: str | None = None
    port: int = 22
    connect_timeout_s: float = 10.0
    silence_s: float = 15.0

    def key_files(self) -> list[str]:
        """The private keys to try.

        Raises:
            UserError: `key_file` does not exist.
        """
        if self.key_file is not None:
            path = os.path.expanduser(self.key_file)
            if not os.path.isfile(path):
                raise UserError(
                    f"no SSH key {self.key_file}: create one with `ssh-keygen -t ed25519 -f {self.key_file}`"
                )
            return [path]
        paths = [os.path.expanduser(path) for path in KEY_FILES]
        return [path for path in paths if os.path.isfile(path)][:1]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one command on one host.

    Args:
        code: exit code; None if the command did not end (`error` says why).
        output: standard output and standard error, in order of arrival.
        refused: whether the error concerns keys or accounts instead of the network.
    """

    host: Host
    code: int | None
    output: str = ""
    error: str | None = None
    refused: bool = False

    def __str__(self) -> str:
        reason = self.error or f"exit code {self.code}"
        lines = self.output.rstrip().splitlines()[-SHOWN_LINES:]
        return "\n".join(shown(line) for line in [f"{self.host}: {reason}", *(f"  {line}" for line in lines)])


class _HostsError(Exception):
    def __init__(self, lines: Sequence[str], outcomes: Sequence[Outcome]):
        super().__init__(*lines)
        self.outcomes = tuple(outcomes)


class HostsFailed(_HostsError, RunError):
    """A command failed on some hosts. `outcomes` has those of all hosts."""


class HostsRefused(_HostsError, UserError):
    """Some hosts could not be used, all because of keys or accounts. `outcomes` has those of all hosts."""
