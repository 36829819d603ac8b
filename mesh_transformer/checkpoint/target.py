"""Writes a new folder atomically: it appears complete or not at all.

Temporary paths in the parent of the folder O, with names that nothing else uses:

    .O.mtj-partial     the new folder while it is being written
    .O.mtj-previous    the previous folder O while the new one replaces it
    .O.mtj-moving      on `gs://`, where nothing can be renamed: the partial folder is complete and is being moved to O

If a run is interrupted, the next run that writes to the same path completes or undoes its work. Only one process may
write to a path at a time.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

from mesh_transformer import files
from mesh_transformer.errors import UserError, listed, options_to_add
from mesh_transformer.logs import log


@contextlib.contextmanager
def new_folder(
    path: str,
    *,
    overwrite: bool = False,
    source: str | None = None,
    marker: str | None = None,
    replaceable: Callable[[str], object] = lambda _: True,
) -> Iterator[str]:
    """The temporary folder to write to, which does not exist yet.

    It is moved to `path` when the block ends, and deleted if the block fails.

    Args:
        overwrite: whether to replace an existing folder.
        replaceable: called with the path of the existing folder; whether it may be replaced. Default: any folder.
        source: the folder that is read in the block; `path` must not contain it.
        marker: the name of an empty file that is written last; for readers it marks the folder as complete.

    Raises:
        UserError: as `check_free`; nothing is changed.
    """
    path = _absolute(path)
    partial = temporary_path(path, "partial")
    _recover(path, marker)
    check_free(path, overwrite=overwrite, source=source, replaceable=replaceable)
    if _exists(partial):
        log.warning("an earlier run was interrupted before %s was complete: its partial output is deleted", path)
        files.remove_tree(partial)
    try:
        yield partial
        if not _exists(partial):
            raise RuntimeError(f"nothing was written to {partial}")
        _replace(path, marker)
    except BaseException:
        if _exists(partial) and not files.exists(temporary_path(path, "moving")):
            files.remove_tree(partial)
        raise


def check_free(
    path: str, *, overwrite: bool, source: str | None = None, replaceable: Callable[[str], object] = lambda _: True
) -> None:
    """Refuse a target that exists already, or that contains the checkpoint to read.

    Raises:
        UserError: `path` is a file, a non-empty folder that may not be overwritten, or a folder that contains `source`;
            or it cannot be created.
    """
    if files.is_remote(path) and files.exists(temporary_path(path, "moving")):
        # `new_folder` first completes the interrupted move, and checks again
        return
    if not files.is_remote(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a file: choose a new folder")
    names = files.list_dir(path)
    if names and not replaceable(path):
        raise UserError(
            f"{path} exists already and is no checkpoint of this format, it holds {listed(names)}: choose another "
            "folder"
        )
    if names and not overwrite:
        replace = options_to_add("--overwrite")
        raise UserError(f"{path} exists already: choose a new folder, or give {replace} to replace it")
    if not files.is_remote(path):
        files.check_writable(os.path.dirname(os.path.abspath(path)))
    if source is not None and f"{_absolute(source)}/".startswith(f"{_absolute(path)}/"):
        raise UserError(f"{path} contains the checkpoint to read, {source}: choose a folder outside it")


def temporary_path(path: str, role: str) -> str:
    """The temporary path of a target for a role: "partial", "previous" or "moving"."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return f"{parent}/.{name}.mtj-{role}"


def _absolute(path: str) -> str:
    """The absolute path without symbolic links: the target of a link is replaced, not the link."""
    return path.rstrip("/") if files.is_remote(path) else os.path.realpath(path)


def _replace(path: str, marker: str | None) -> None:
    partial, previous = temporary_path(path, "partial"), temporary_path(path, "previous")
    if files.is_remote(path):
        files.replace(temporary_path(path, "moving"), b"removing\n")
        _finish_move(path, marker)
        return
    if marker is not None:
        files.replace(files.join(partial, marker), b"")
    if os.path.isdir(path):
        files.move_tree(path, previous)
    files.move_tree(partial, path)
    if os.path.isdir(previous):
        files.remove_tree(previous)


def _finish_move(path: str, marker: str | None) -> None:
    """Continue a move on `gs://` from its recorded stage: delete the old folder, then move the partial one to
    `path`."""
    if files.read_range(temporary_path(path, "moving"), 0, 64) == b"removing\n":
        files.remove_tree(path)
        files.replace(temporary_path(path, "moving"), b"moving\n")
    # files that were moved before the interruption are no longer in the partial folder
    if _exists(temporary_path(path, "partial")):
        files.move_tree(temporary_path(path, "partial"), path)
    if marker is not None:
        files.replace(files.join(path, marker), b"")
    files.remove(temporary_path(path, "moving"))


def _recover(path: str, marker: str | None) -> None:
    """Complete or undo the work of an interrupted run."""
    previous = temporary_path(path, "previous")
    if files.is_remote(path):
        if files.exists(temporary_path(path, "moving")):
            log.warning("an earlier run was interrupted while it moved its result to %s: completing the move", path)
            _finish_move(path, marker)
    elif os.path.isdir(previous):
        if os.path.isdir(path):
            files.remove_tree(previous)
        else:
            files.move_tree(previous, path)


def _exists(folder: str) -> bool:
    return bool(files.list_dir(folder)) if files.is_remote(folder) else os.path.isdir(folder)
