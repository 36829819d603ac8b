"""This user's own folder on a host: the locks of its runs, and the output of their workers.

It lies in the temporary folder, where every user may make files and links. So it is used only if no other user can have a
hand in it, and its files are opened without following links.
"""

from __future__ import annotations

import contextlib
import os
import tempfile

from mesh_transformer.errors import UserError


def open_file(name: str, flags: int) -> int:
    """Open a file of the folder; both are made if missing. Returns the file descriptor.

    Args:
        name: without a folder.
        flags: as of `os.open`.

    Raises:
        UserError: the folder or the file is a link, or the folder belongs or is open to others.
    """
    path = os.path.join(tempfile.gettempdir(), f"mesh-transformer-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(path, f"cannot be opened, or is a link or no folder ({error.strerror})") from error
    try:
        _check(path, os.fstat(folder))
        return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        raise _refusal(
            os.path.join(path, name), f"cannot be opened, or is a link ({error.strerror})"
        ) from error
    finally:
        os.close(folder)


def _check(path: str, found: os.stat_result) -> None:
    if found.st_uid != os.getuid():
        raise _refusal(path, f"belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        raise _refusal(path, f"is open to other users (mode {found.st_mode & 0o777:o})")


def _refusal(path: str, why: str) -> UserError:
    return UserError(
        f"{path} {why}, so other users may have a hand in the locks of your runs: remove it, or set TMPDIR to a folder "
        "of your own"
    )
