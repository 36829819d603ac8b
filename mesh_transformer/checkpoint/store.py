"""Checkpoints of a run: asynchronous, atomic, restorable on any mesh, local or on `gs://`. Orbax writes, `load.py`
reads.

    {root}/step_1000/state/      the tensors (OCDBT)
    {root}/step_1000/manifest/   shapes, dtypes, checksums and the caller's JSON: see manifest.py
    {root}/set_aside/step_1000/  what a later save found in its way: damaged, or of an abandoned branch of the run

A step is finished once its folder was renamed from its temporary name (local) or holds `commit_success.txt`
(`gs://`, where nothing can be renamed). Other files under the root, steps of the original program (`open.py`) among
them, are never read or deleted. One run writes to a root at a time; any number may read.

Several processes: the root must be one shared folder, and all processes call every method alike. Process 0 lists the
folder and the others take its list. Each reads the manifest and its own shards, then all exchange whether they could:
if one failed, all fail, and all turn to the same earlier step.
"""

import logging
import os
import re
import sys
from collections.abc import Container, Iterator
from functools import partial
from typing import Any, NamedTuple

import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from mesh_transformer import files
from mesh_transformer.checkpoint.classic import folder as classic_folder
from mesh_transformer.checkpoint.identity import check_model, check_optimizer
from mesh_transformer.checkpoint.load import fail_together, restore
from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native.source import CHUNK_BYTES, COMMIT_MARKER, NativeSource
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.config import ModelConfig, OptimizerConfig
from mesh_transformer.errors import UserError, is_disk_full

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 3600
TEMPORARY = ".orbax-checkpoint-tmp"
# all that a save makes in a step's folder
STEP_FILES = {"state", "manifest", "_CHECKPOINT_METADATA", COMMIT_MARKER}


class Checkpoint(NamedTuple):
    """A restored checkpoint; `extra` is the JSON given to `save`: loader state, counters, config."""

    step: int
    state: Any
    extra: dict[str, Any]


class CheckpointStore:
    """The checkpoints under one root."""

    def __init__(
        self,
        root: str,
        *,
        keep_every: int | None = None,
        keep_latest: int = 1,
        read_only: bool = False,
        model: ModelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        """Open `root`, which need not exist; unless `read_only`, make it and delete what broken-off saves left.

        With `model`, a step that notes another architecture is not restored; with `optimizer`, none without its state.
        """
        _silence_libraries()
        self._root = root if files.is_remote(root) else os.path.abspath(root)
        self._keep, self._model, self._optimizer = (keep_every, keep_latest), model, optimizer
        self._save_failed = False
        self._damaged: set[int] = set()  # steps that `restore` passed over
        self._manager = None if read_only else self._open()

    def steps(self) -> list[int]:
        """The finished steps, ascending, as they are on the disk now."""
        names = files.list_dir(self._root)
        return [n for n in classic_folder.step_numbers(names) if self._finished(f"step_{n}")]

    def folder(self, step: int) -> str:
        """Where a step is, or would be."""
        return files.join(self._root, f"step_{step}")

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Write a pytree of arrays and some JSON; returns once the arrays are copied to the host.

        The step appears, whole, when the writing is done: `wait` tells. Steps not kept are deleted after that.
        Damaged steps that `restore` passed over, and finished ones with this number or a greater one (an
        abandoned branch of the run), are first moved to `set_aside/`: they count for nothing that is kept.

        Raises:
            TypeError: `extra` is not JSON.
            Exception: the error of the save before, if it failed after returning.
        """
        self.wait()
        manager = self._writer()
        # something of others may stand there; this is found out before all meet in `describe`
        theirs = files.list_dir(self.folder(step)) and not self._finished(f"step_{step}")
        document = manifests.encode(manifests.describe(state, extra))
        older = [old for old in manager.all_steps() if old >= step or old in self._damaged]
        self._set_aside([step, *older] if theirs else older)
        self._damaged.clear()
        tensors = ocp.args.PyTreeSave(state, save_args=jax.tree.map(_save_args, state))
        args = ocp.args.Composite(state=tensors, manifest=ocp.args.JsonSave(document))
        with files.remote_call(self._root):
            manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            Exception: what made the save fail; the steps before it are untouched.
        """
        if self._manager is None:
            return
        try:
            with files.remote_call(self._root):
                self._manager.wait_until_finished()
        except Exception:
            self._save_failed = True
            raise

    def restore(self, abstract_state: Any) -> Checkpoint | None:
        """Read a state onto the shardings of `abstract_state`, a pytree of `jax.ShapeDtypeStruct` with sharding.

        The newest step that is whole, or None if there is none at all. A damaged one is passed over with a warning.

        Raises:
            UserError: the checkpoint is of another model, or all are damaged.
        """
        self.wait()
        tried: dict[int, str] = {}
        while (step := self._newest(tried)) is not None:
            try:
                with files.remote_call(self._root):
                    source = fail_together(partial(NativeSource, self.folder(step)))
                    if self._model is not None:
                        check_model(source, self._model)
                    if self._optimizer is not None:
                        check_optimizer(source, self._optimizer)
                    return Checkpoint(step, restore(source, abstract_state, part=False), source.extra)
            except DamagedCheckpoint as damage:
                tried[step] = str(damage)
                self._damaged.add(step)
                log.warning("checkpoint step %d in %s is damaged, passed over: %s", step, self._root, damage)
        if tried:
            raise UserError(
                f"no checkpoint in {self._root} can be restored:\n"
                + "\n".join(f"  step {number}: {reason}" for number, reason in tried.items())
                + "\nchoose another model_dir to start afresh"
            )
        return None

    def close(self) -> None:
        """Finish the save under way and release the threads.

        Raises:
            Exception: what made the save fail.
        """
        try:
            self.wait()
        finally:
            self._close_manager()

    def _newest(self, tried: Container[int]) -> int | None:
        """The newest finished step not tried yet, as process 0 sees it."""
        there = [step for step in self.steps() if step not in tried]
        newest = int(multihost_utils.broadcast_one_to_all(np.int32(max(there, default=-1))))
        return None if newest < 0 else newest

    def _open(self) -> ocp.CheckpointManager:
        self._delete_unfinished()
        return _manager(self._root, *self._keep)

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            raise RuntimeError("this checkpoint store is read-only or closed")
        # after a failure Orbax would raise that error again, and has crossed out steps that still exist
        if self._save_failed:
            self._close_manager()
            self._manager, self._save_failed = self._open(), False
        return self._manager

    def _close_manager(self) -> None:
        manager, self._manager = self._manager, None
        try:
            if manager is not None:
                manager.close()
        except Exception:
            if not self._save_failed:  # otherwise `wait` has raised it
                raise

    def _finished(self, name: str) -> bool:
        if files.is_remote(self._root):
            return files.exists(files.join(self._root, name, COMMIT_MARKER))
        return not classic_folder.is_step(files.join(self._root, name))

    def _delete_unfinished(self) -> None:
        """Process 0 only; the manager's construction waits for it. Orbax's own clean-up would take every folder
        without a commit marker on gs://, such as tensorboard/."""
        for name in files.list_dir(self._root) if jax.process_index() == 0 else ():
            match = re.fullmatch(rf"step_\d+({re.escape(TEMPORARY)}.*)?", name)
            folder = files.join(self._root, name)
            if not match or (not match[1] and (self._finished(name) or classic_folder.is_step(folder))):
                continue
            strange = set() if match[1] else set(files.list_dir(folder)) - STEP_FILES
            if strange:
                log.warning("%s is no step of ours, it holds %s: left alone", folder, sorted(strange)[:5])
            else:
                files.remove_tree(folder)

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        for step in steps if jax.process_index() == 0 else ():
            target = _free_path(files.join(self._root, "set_aside"), f"step_{step}")
            log.warning("checkpoint step %d in %s is in the way: moved to %s", step, self._root, target)
            files.move_tree(self.folder(step), target)
        multihost_utils.sync_global_devices("mesh_transformer: set aside")
        self._writer().reload()


def _free_path(folder: str, name: str) -> str:
    taken = set(files.list_dir(folder))
    names = (name if not n else f"{name}.{n}" for n in range(len(taken) + 1))
    return files.join(folder, next(candidate for candidate in names if candidate not in taken))


class _StepNames:
    """Orbax's `step_N`, without the folders of the original program: Orbax would count them and delete them."""

    def __init__(self) -> None:
        step_names = ocp.path.step.standard_name_format
        self._standard = step_names(step_prefix="step", single_host_load_and_broadcast=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standard, name)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        found = self._standard.find_all(base_path)
        return (step for step in found if not classic_folder.is_step(str(step.path)))


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _not_disk_full(record: logging.LogRecord) -> bool:
    return not (record.exc_info and is_disk_full(record.exc_info[1]))


def _unraisable_hook(unraisable: "sys.UnraisableHookArgs") -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        _previous_unraisable_hook(unraisable)


_previous_unraisable_hook = sys.unraisablehook


def _silence_libraries() -> None:
    """Leave out of the log what Orbax tells of each file, and what its threads tell of a save that fails: it is raised."""
    for library in ("absl", "fsspec"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("absl").addFilter(_below_error)
    # one write's failure is raised; asyncio tells of each of the others
    logging.getLogger("asyncio").addFilter(_not_disk_full)
    # writes of TensorStore that end after one has failed do not find Orbax's event loop any more
    sys.unraisablehook = _unraisable_hook


def _save_args(leaf: Any) -> ocp.SaveArgs:
    """Matrices layer by layer and in small chunks, so that a slice is read without the whole tensor."""
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if np.ndim(leaf) == 3 else ())


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Wait for the other processes of a save. Orbax calls it after a failure too, while it handles the exception."""
    # No other process reaches the barrier of a failure: the wait would only hide the error.
    if sys.exception() is not None:
        raise
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _manager(root: str, keep_every: int | None, keep_latest: int) -> ocp.CheckpointManager:
    """What writes the steps under `root` and deletes those that are not kept."""
    policies: list[Any] = [preservation_policy.LatestN(keep_latest)]
    if keep_every is not None:
        policies.append(preservation_policy.EveryNSteps(keep_every))
    options = ocp.CheckpointManagerOptions(
        step_name_format=_StepNames(),
        preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
        single_host_load_and_broadcast=True,
        save_root_metadata=False,
        lightweight_initialize=True,
        async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S, barrier_sync_fn=_barrier),
    )
    # gcsfs remembers listings for ever, also of folders that were moved or deleted by other means than itself
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "manifest": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(root, options=options, item_handlers=handlers)
