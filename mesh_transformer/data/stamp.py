"""What tells a file from another that has taken its name: its size, and a hash of its beginning."""

import hashlib

from mesh_transformer import files
from mesh_transformer.errors import UserError

_HEAD_BYTES = 64 << 10


def stamp(path: str) -> str:
    """The stamp of a file (local or `gs://`), wherever it lies: a copy has the same one.

    Raises:
        UserError: there is no such file.
    """
    head = hashlib.sha256(files.read_range(path, 0, _HEAD_BYTES)).hexdigest()
    return f"{files.size(path)} bytes, sha256 of the first 64 KiB {head[:16]}..."


def check_stamp(path: str, noted: str) -> None:
    """
    Raises:
        UserError: the file is missing, or not the one whose stamp was noted with a data position.
    """
    found = stamp(path)
    if found != noted:
        raise UserError(
            f"{path} has changed since the data position was stored (then: {noted}; now: {found}): bring back the "
            f"former file, or read the data from its beginning with --set data.restart=true"
        )
