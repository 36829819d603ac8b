"""Stamps of data files. A stored data position has the stamps of its files, so that a change of a file is noticed."""

import hashlib

from mesh_transformer.errors import UserError, set_options
from mesh_transformer.files import read_range, size

_STAMPED_BYTES = 64 << 10


def stamp_of(path: str) -> str:
    """The size of a file (local or `gs://`) and a hash of its beginning, which identify it beside its name.

    Raises:
        UserError: there is no such file.
    """
    head = hashlib.sha256(read_range(path, 0, _STAMPED_BYTES)).hexdigest()
    return f"{size(path)} bytes, sha256 of the first 64 KiB {head[:16]}..."


def or_restart() -> str:
    """The end of a message about data that differ from those of a stored position."""
    return f"or read the data from its beginning with {set_options('data.restart=true')}"


def check_stamp(path: str, current: str, stored: str) -> None:
    """Compare the stamp of a file with the one stored in a data position.

    Raises:
        UserError: the file has changed.
    """
    if current != stored:
        raise UserError(
            f"{path} has changed since the data position was stored (then: {stored}; now: {current}): restore the "
            f"former file, {or_restart()}"
        )
