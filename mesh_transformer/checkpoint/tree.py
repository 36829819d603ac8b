"""Checkpoints of any tree of arrays, saved on one mesh and loaded on another. docs/library.md describes the names here.

The files are as in a run ({root}/step_N, see `store.py`): each process writes its own shards, a step appears
complete or not at all, and each tensor has a checksum. A run's own checkpoints hold other trees and are refused.
"""

from functools import partial
from typing import Any

from mesh_transformer import files
from mesh_transformer.checkpoint.load import fail_together, restore
from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native.source import NativeSource
from mesh_transformer.checkpoint.store import Checkpoint, CheckpointStore
from mesh_transformer.errors import UserError, listed

__all__ = ["Checkpoint", "load_tree", "save_tree"]
# the folder of the names of a tree, apart from the names of a training state
TOP = "tree"


def save_tree(
    root: str,
    step: int,
    tree: Any,
    extra: dict[str, Any] | None = None,
    *,
    keep_latest: int = 3,
    replace: bool = False,
) -> None:
    """Save a tree of `jax.Array` as a step under `root`, local or `gs://`, and return when it is complete.

    All processes must call it. Finished steps with a greater number are moved to `{root}/set_aside`.

    Args:
        extra: JSON to keep with the tree.
        keep_latest: number of newest steps to keep.
        replace: whether the step may exist. The existing one is moved to `{root}/set_aside` and never deleted.

    Raises:
        UserError: the step exists, and `replace` is not set.
        TypeError: `extra` is not JSON.
    """
    store = CheckpointStore(root, keep_latest=keep_latest)
    try:
        if not replace and step in store.steps():
            raise UserError(
                f"{store.folder(step)} exists: save another step, or pass replace=True, which moves the existing step "
                f"to {files.join(root, 'set_aside')}"
            )
        store.save(step, {TOP: tree}, extra or {})
    finally:
        store.close()


def load_tree(root: str, like: Any, *, step: int | None = None, part: bool = False) -> Checkpoint:
    """The tree of a step under `root`, on the devices of `like`: its step, `state` (the tree) and `extra`.

    All processes must call it. Each reads only what its devices need, and compares checksums.

    Args:
        like: a tree of arrays, or of `jax.ShapeDtypeStruct` with shardings (`Partition.abstract`): the shapes and
            dtypes that were saved, on any mesh.
        step: None: the newest.
        part: whether `like` may leave out some of the saved arrays.

    Raises:
        UserError: the folder holds no such step, or another tree; the message names the tensors.
        DamagedCheckpoint: a file is missing, or its bytes have changed.
    """
    store = CheckpointStore(root, read_only=True)
    found = store.newest() if step is None else step
    if found is None or (step is not None and step not in store.steps()):
        what = "step" if step is None else f"step_{step}"
        raise UserError(f"{root} holds no {what} that save_tree wrote; it holds {listed(files.list_dir(root))}")
    with files.remote_call(root):
        source = fail_together(partial(NativeSource, store.folder(found)))
        if wrong := manifests.differences(source.manifest, {TOP: like}, part=part):
            raise UserError(f"{source.where} holds another tree than `like`:", *wrong, "give a tree like the saved one")
        return Checkpoint(found, restore(source, {TOP: like}, part=part)[TOP], source.extra)
