"""A new folder that appears whole or not at all.

Beside the folder O, under names that nobody else gives:

    .O.mtj-partial     what is being written
    .O.mtj-previous    what stood at O, while the new folder takes its place
    .O.mtj-moving      on `gs://`, where nothing can be renamed: the partial folder is whole and is being moved to O

What an interrupted run left is put right by the next one that writes to the same place. One process writes to a place
at a time.
"""

import contextlib
import os
from collections.abc import Iterator

from mesh_transformer import files
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log


@contextlib.contextmanager
def new_folder(
    path: str, *, overwrite: bool = False, source: str | None = None, marker: str | None = None
) -> Iterator[str]:
    """The temporary folder to write to, not made yet; it becomes `path` when the block ends, and goes if it fails.

    Args:
        source: the folder that is read meanwhile, which `path` must not replace.
        marker: the name of an empty file that is put into the folder last of all, which tells readers that it is whole.

    Raises:
        UserError: `path` is there already, and is not an empty folder; nothing was changed.
    """
    path = _absolute(path)
    partial = temporary_path(path, "partial")
    _recover(path, marker)
    check_free(path, overwrite=overwrite, source=source)
    if _exists(partial):
        log.warning("an earlier run was cut short before %s was whole: its part is deleted", path)
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


def check_free(path: str, *, overwrite: bool, source: str | None = None) -> None:
    """Refuse a target that is there already, or that holds what is to be read.

    Raises:
        UserError: it is a file, a folder that is not empty and may not be overwritten, or one that holds `source`.
    """
    if not files.is_remote(path) and os.path.lexists(path) and not os.path.isdir(path):
        raise UserError(f"{path} is a file: name a new folder")
    if files.list_dir(path) and not overwrite:
        raise UserError(f"{path} is there already: name a new folder, or pass --overwrite to replace it")
    if source is not None and f"{_absolute(source)}/".startswith(f"{_absolute(path)}/"):
        raise UserError(f"{path} holds the checkpoint that is read, {source}: name a folder outside of it")


def temporary_path(path: str, what: str) -> str:
    """The place beside a target for what is "partial", "previous" or "moving"."""
    parent, _, name = path.rstrip("/").rpartition("/")
    return f"{parent}/.{name}.mtj-{what}"


def _absolute(path: str) -> str:
    """Without links: what a link points to is replaced, not the link."""
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
    """From the noted stage on: remove what stands at `path`, then move the whole partial folder there."""
    if files.read_range(temporary_path(path, "moving"), 0, 64) == b"removing\n":
        files.remove_tree(path)
        files.replace(temporary_path(path, "moving"), b"moving\n")
    if _exists(temporary_path(path, "partial")):  # what was moved before is moved no more
        files.move_tree(temporary_path(path, "partial"), path)
    if marker is not None:
        files.replace(files.join(path, marker), b"")
    files.remove(temporary_path(path, "moving"))


def _recover(path: str, marker: str | None) -> None:
    """Finish or undo what a run that was killed began here."""
    previous = temporary_path(path, "previous")
    if files.is_remote(path):
        if files.exists(temporary_path(path, "moving")):
            log.warning("an earlier run was cut short while it moved its result to %s: going on", path)
            _finish_move(path, marker)
    elif os.path.isdir(previous):
        if os.path.isdir(path):
            files.remove_tree(previous)
        else:
            files.move_tree(previous, path)


def _exists(folder: str) -> bool:
    return bool(files.list_dir(folder)) if files.is_remote(folder) else os.path.isdir(folder)
