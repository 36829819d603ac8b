"""A new folder that appears whole or not at all, and the progress of what fills it.

    O.tmp/        what is being written
    O.old/        what stood at O, while the new folder takes its place
    O.moving      on `gs://`, where nothing can be renamed: O.tmp is whole and is being copied to O

What an interrupted run left is put right by the next one that writes to the same place. One process writes to a place
at a time.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from mesh_transformer import files
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Progress, log

MEGABYTE = 1_000_000


@contextlib.contextmanager
def new_folder(path: str, *, overwrite: bool = False) -> Iterator[str]:
    """The temporary folder to write to, not made yet; it becomes `path` when the block ends, and goes if it fails.

    Raises:
        UserError: `path` is there already, and is not an empty folder; nothing was changed.
    """
    path = path.rstrip("/") if files.is_remote(path) else os.path.abspath(path)
    temporary = f"{path}.tmp"
    _put_right(path)
    check_free(path, overwrite=overwrite)
    try:
        yield temporary
        if not _is_there(temporary):
            raise RuntimeError(f"nothing was written to {temporary}")
        _replace(path, temporary)
    except BaseException:
        if _is_there(temporary) and not files.exists(_marker(path)):
            files.remove_tree(temporary)
        raise


def check_free(path: str, *, overwrite: bool) -> None:
    """Refuse a target that is there already.

    Raises:
        UserError: it is a file, or a folder that is not empty and may not be overwritten.
    """
    if not files.is_remote(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a file: name a new folder")
    if files.list_dir(path) and not overwrite:
        raise UserError(f"{path} is there already: name a new folder, or pass --overwrite to replace it")


def _replace(path: str, temporary: str) -> None:
    if files.is_remote(path):
        with files.open_binary(_marker(path), "wb") as file:
            file.write(b"\n")
        if files.list_dir(path):
            files.remove_tree(path)
        files.move_tree(temporary, path)
        files.remove(_marker(path))
        return
    old = f"{path}.old"
    if os.path.isdir(path):
        files.move_tree(path, old)
    files.move_tree(temporary, path)
    if os.path.isdir(old):
        files.remove_tree(old)


def _put_right(path: str) -> None:
    """Undo what a run that was killed began here."""
    temporary, old = f"{path}.tmp", f"{path}.old"
    if files.is_remote(path):
        if files.exists(_marker(path)):
            log.warning("an earlier run was cut short while it moved its result to %s: deleted", path)
            for folder in (path, temporary):
                files.remove_tree(folder)
            files.remove(_marker(path))
    elif os.path.isdir(old):
        if os.path.isdir(path):
            files.remove_tree(old)
        else:
            files.move_tree(old, path)
    if _is_there(temporary):
        log.warning("an earlier run was cut short before %s was whole: its part is deleted", path)
        files.remove_tree(temporary)


def _is_there(folder: str) -> bool:
    return bool(files.list_dir(folder)) if files.is_remote(folder) else os.path.isdir(folder)


def _marker(path: str) -> str:
    return f"{path}.moving"


class Transfer:
    """Progress of so many bytes: done, rate and time left. `add` may be called from any thread."""

    def __init__(self, what: str, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._progress = Progress(what, -(-self._total // MEGABYTE), unit="MB")
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._done = 0

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()

    def add(self, n_bytes: int) -> None:
        """So many bytes more are done."""
        with self._lock:
            self._done += n_bytes
            rate = self._done / max(time.monotonic() - self._began, 1e-9) / MEGABYTE
            whole = self._done >= self._total
            shown = -(-self._total // MEGABYTE) if whole else self._done // MEGABYTE
            self._progress.update(shown, rate=f"{rate:.0f} MB/s")
