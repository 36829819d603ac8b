"""The folders of the caches of the commands, and a folder of this user below a temporary folder."""

from __future__ import annotations

import contextlib
import errno
import logging
import os

from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)


def user_cache() -> str:
    """The cache folder of this user: XDG_CACHE_HOME, or ~/.cache."""
    return os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")


def own(name: str) -> str:
    """A folder of this program in the user's cache folder."""
    return os.path.join(user_cache(), "mesh-transformer", name)


def compiled_programs() -> str:
    """The folder of JAX's compiled programs: JAX_COMPILATION_CACHE_DIR, or `own("compiled")`."""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR", own("compiled"))


def data_sets() -> str:
    """The folder of tokenized text files, and of the places of records in record files."""
    return own("datasets")


def open_data_sets() -> str:
    """Create `data_sets()` if it does not exist, and return it. The folder of earlier versions is moved there."""
    folder, earlier = data_sets(), os.path.join(user_cache(), "mesh_transformer", "datasets")
    if not os.path.exists(folder):
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        try:
            os.rename(earlier, folder)
            os.rmdir(os.path.dirname(earlier))
        except OSError as error:
            # there is none, another process has moved it, or other files are beside it
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                log.warning("%s is not moved to %s: %s", earlier, folder, error.strerror)
    os.makedirs(folder, exist_ok=True)
    return folder


def hugging_face() -> str:
    """The folder of huggingface_hub: HF_HOME, or huggingface in the user's cache folder."""
    return os.path.expanduser(os.environ.get("HF_HOME") or os.path.join(user_cache(), "huggingface"))


def temporary(parent: str) -> str:
    """The path of this user's folder below a temporary folder."""
    return os.path.join(parent, f"mesh-transformer-{os.getuid()}")


def open_temporary(parent: str) -> int:
    """Open `temporary(parent)`, and create it if needed. Returns its file descriptor.

    Every user can create files and links in `parent`, so the folder is refused if others have access to it.

    Raises:
        UserError: it is a link or no folder, or other users can access it.
    """
    path = temporary(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise unsafe(path, f"cannot be opened, is a link, or is no folder ({error.strerror})") from error
    status = os.fstat(folder)
    if status.st_uid != os.getuid():
        fault = f"belongs to user {status.st_uid}"
    elif status.st_mode & 0o077:
        fault = f"is open to other users (mode {status.st_mode & 0o777:o})"
    else:
        return folder
    os.close(folder)
    raise unsafe(path, fault)


def unsafe(path: str, why: str) -> UserError:
    """The error of a file or folder in which another user may write."""
    return UserError(
        f"{path} {why}, so another user may control what your runs keep there: remove it, or set TMPDIR to a folder of "
        "your own"
    )
