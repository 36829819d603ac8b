"""The checkpoints of a run, local or on `gs://`: saved asynchronously and atomically, restored on any mesh.

Orbax writes the checkpoints and `load.py` reads them.

    {root}/step_1000/state/      the tensors (OCDBT)
    {root}/step_1000/hf/         if the run started from a Hugging Face folder: see origin.py
    {root}/step_1000/manifest/   shapes, dtypes, checksums and the caller's JSON: see native/manifest.py
    {root}/set_aside/step_1000/  a step that a later save moved away: replaced, damaged, or of an abandoned branch

A step is finished when its folder is renamed from a temporary name (local) or holds `commit_success.txt`
(`gs://`, where nothing can be renamed). Other files under the root, including steps of the original program
(`classic/`), are never read or deleted. Only one run may write to a root at a time; any number may read it.

With several processes, the root must be a shared folder, and all processes must make the same calls. Process 0 lists
the folder and broadcasts the step. Each process reads the manifest and its own shards, then all exchange whether they
succeeded: if one fails, all fail and fall back to the same earlier step.
"""

import contextlib
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Container, Iterator, Mapping
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
from mesh_transformer.checkpoint.identity import check_lora, check_model, check_optimizer
from mesh_transformer.checkpoint.load import fail_together, restore
from mesh_transformer.checkpoint.native import manifest as manifests
from mesh_transformer.checkpoint.native.source import CHUNK_BYTES, COMMIT_MARKER, NativeSource
from mesh_transformer.checkpoint.origin import FOLDER, Origin
from mesh_transformer.checkpoint.tensors import DamagedCheckpoint
from mesh_transformer.config import LoraConfig, ModelConfig, OptimizerConfig
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)

SAVE_TIMEOUT_S = 3600
# Orbax lets each replica of an array write a slice of it, and compiles a program for each shape: not for small slices
REPLICA_SLICE_BYTES = 1 << 20
TEMPORARY = ".orbax-checkpoint-tmp"
# why `save` moves an intact step away, which is no reason to warn
_REPLACED = "replaced by a newer save of this step"
# the names that a save creates in the folder of a step
STEP_FILES = {"state", "manifest", FOLDER, "_CHECKPOINT_METADATA", COMMIT_MARKER}


class Checkpoint(NamedTuple):
    """A restored checkpoint. `extra` is the JSON that was given to `save`: loader state, counters, config."""

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
        keep_latest: int = 2,
        read_only: bool = False,
        model: ModelConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        """Open `root`. Unless `read_only`, create it if needed, and delete the remains of interrupted saves.

        Args:
            keep_every: keep each step whose number is a multiple of it, forever; None: no such steps.
            keep_latest: number of newest steps to keep.
            model: `restore` refuses a step that records another architecture.
            optimizer: `restore` refuses a step without the state of this optimizer.
            lora: `restore` refuses a step with other adapters.
        """
        self._root = root if files.is_remote(root) else os.path.abspath(root)
        self._keep, self._model, self._optimizer = (keep_every, keep_latest), model, optimizer
        self._lora = lora
        self._save_failed = False
        # steps that `restore` skipped
        self._damaged: set[int] = set()
        self._settings = contextlib.ExitStack()
        self._manager = None if read_only else self._open()

    def steps(self) -> list[int]:
        """The finished steps in the folder now, ascending."""
        names = files.list_dir(self._root)
        return [n for n in classic_folder.step_numbers(names) if self._finished(f"step_{n}")]

    def folder(self, step: int) -> str:
        """The path of a step, which need not exist."""
        return files.join(self._root, f"step_{step}")

    def save(self, step: int, state: Any, extra: dict[str, Any], origin: Origin | None = None) -> None:
        """Save a pytree of arrays, the JSON `extra` and the files of `origin`; return when the arrays are copied to the
        host.

        The step appears complete when the write is finished; `wait` returns then. After that, old steps that need not
        be kept are deleted. Before the write, damaged steps that `restore` skipped and finished steps with the same or
        a greater number (an abandoned branch of the run) are moved to `set_aside/`, and no longer count as kept steps.

        Raises:
            TypeError: `extra` is not JSON.
            Exception: the error of the previous save, if it failed after it returned.
        """
        self.wait()
        manager = self._writer()
        # The folder may hold foreign files. All processes list it before the collective call in `describe`.
        foreign = files.list_dir(self.folder(step)) and not self._finished(f"step_{step}")
        recorded = extra if origin is None else {**extra, "origin": origin.to_json()}
        document = manifests.encode(manifests.describe(state, recorded))
        reasons = {old: f"newer than step {step}, which is saved now" for old in manager.all_steps() if old > step}
        if foreign:
            reasons[step] = "not from this program"
        elif step in manager.all_steps():
            reasons[step] = _REPLACED
        reasons |= {old: "damaged" for old in manager.all_steps() if old in self._damaged}
        self._set_aside(reasons)
        self._damaged.clear()
        tensors = ocp.args.PyTreeSave(state, save_args=jax.tree.map(_save_args, state))
        kept = {} if origin is None else {FOLDER: _SaveFiles(origin.files)}
        args = ocp.args.Composite(state=tensors, manifest=ocp.args.JsonSave(document), **kept)
        with files.remote_call(self._root):
            manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Wait until no save is in progress.

        Raises:
            Exception: the error of the save; earlier steps are unchanged.
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
        """Restore the newest intact step with the shardings of `abstract_state`, a pytree of `jax.ShapeDtypeStruct`.

        Returns None if there is no step. Skips a damaged step with a warning.

        Raises:
            UserError: the checkpoint is of another model or optimizer, or all steps are damaged.
        """
        self.wait()
        reasons: dict[int, str] = {}
        while (step := self.newest(reasons)) is not None:
            try:
                log.info("reading %s", self.folder(step))
                with files.remote_call(self._root):
                    source = fail_together(partial(NativeSource, self.folder(step)))
                    if self._model is not None:
                        check_model(source, self._model)
                    if self._lora is not None:
                        check_lora(source, self._lora, self._model)
                    if self._optimizer is not None:
                        check_optimizer(source, self._optimizer)
                    return Checkpoint(step, restore(source, abstract_state, part=False), source.extra)
            except DamagedCheckpoint as damage:
                reasons[step] = str(damage)
                self._damaged.add(step)
                log.warning("checkpoint step %d in %s is damaged and skipped: %s", step, self._root, damage)
        if reasons:
            raise UserError(
                f"no checkpoint in {self._root} can be restored:",
                *(f"  step {number}: {reason}" for number, reason in reasons.items()),
                "choose another checkpoint.model_dir to start a new run",
            )
        return None

    def close(self) -> None:
        """Wait for the save in progress and release the threads.

        Raises:
            Exception: the error of the save.
        """
        try:
            self.wait()
        finally:
            self._close_manager()

    def newest(self, excluded: Container[int] = ()) -> int | None:
        """The newest finished step outside `excluded`, as process 0 lists it; None: there is none."""
        steps = [step for step in self.steps() if step not in excluded]
        newest = int(multihost_utils.broadcast_one_to_all(np.int32(max(steps, default=-1))))
        return None if newest < 0 else newest

    def _open(self) -> ocp.CheckpointManager:
        if files.is_remote(self._root):
            self._settings.enter_context(_fresh_listings())
        self._delete_unfinished()
        return _manager(self._root, *self._keep)

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            raise RuntimeError("this checkpoint store is read-only or closed")
        # after a failed save the manager raises that error again, and no longer lists steps that still exist
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
            # after a failed save `wait` has raised the error already
            if not self._save_failed:
                raise
        finally:
            self._settings.close()

    def _finished(self, name: str) -> bool:
        if files.is_remote(self._root):
            return files.exists(files.join(self._root, name, COMMIT_MARKER))
        return not classic_folder.is_step(files.join(self._root, name))

    def _delete_unfinished(self) -> None:
        """Delete the remains of interrupted saves, in process 0; the others wait when they construct the manager.

        On gs:// Orbax's own clean-up would delete every folder without a commit marker, such as tensorboard/.
        """
        for name in files.list_dir(self._root) if jax.process_index() == 0 else ():
            match = re.fullmatch(rf"step_\d+({re.escape(TEMPORARY)}.*)?", name)
            folder = files.join(self._root, name)
            if not match or (not match[1] and (self._finished(name) or classic_folder.is_step(folder))):
                continue
            foreign = set() if match[1] else set(files.list_dir(folder)) - STEP_FILES
            if foreign:
                log.warning(
                    "%s is not a checkpoint of this program, it holds %s: not deleted",
                    folder,
                    sorted(foreign)[:5],
                )
            else:
                files.remove_tree(folder)

    def _set_aside(self, reasons: Mapping[int, str]) -> None:
        """Move each step to `set_aside/`. It is logged with its reason."""
        if not reasons:
            return
        for step, reason in reasons.items() if jax.process_index() == 0 else ():
            target = _free_path(files.join(self._root, "set_aside"), f"step_{step}")
            level = logging.INFO if reason is _REPLACED else logging.WARNING
            log.log(level, "checkpoint step %d in %s is %s: moved to %s", step, self._root, reason, target)
            files.move_tree(self.folder(step), target)
        multihost_utils.sync_global_devices("mesh_transformer: set aside")
        self._writer().reload()


def _free_path(folder: str, name: str) -> str:
    existing = set(files.list_dir(folder))
    names = (name if not n else f"{name}.{n}" for n in range(len(existing) + 1))
    return files.join(folder, next(candidate for candidate in names if candidate not in existing))


class _StepNames:
    """Orbax's name format `step_N`, which ignores steps of the original program: Orbax would count and delete them."""

    def __init__(self) -> None:
        step_names = ocp.path.step.standard_name_format
        self._standard = step_names(step_prefix="step", single_host_load_and_broadcast=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standard, name)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        steps = self._standard.find_all(base_path)
        return (step for step in steps if not classic_folder.is_step(str(step.path)))


def _save_args(leaf: Any) -> ocp.SaveArgs:
    """Store matrices by layer and in small chunks, so that a reader of a slice need not read the whole tensor."""
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if np.ndim(leaf) == 3 else ())


class _FilesHandler(ocp.AsyncCheckpointHandler):
    """Writes files into the folder of an item, in process 0."""

    async def async_save(self, directory: Any, args: "_SaveFiles") -> list[Any]:
        writing = self._write(directory, args.files)
        return [ocp.future.CommitFutureAwaitingContractedSignals(writing, name="files")]

    async def _write(self, directory: Any, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items() if jax.process_index() == 0 else ():
            (directory / name).write_bytes(content)

    def save(self, directory: Any, args: "_SaveFiles") -> None:
        raise NotImplementedError

    def restore(self, directory: Any, args: Any = None) -> None:
        raise NotImplementedError


@ocp.args.register_with_handler(_FilesHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class _SaveFiles(ocp.args.CheckpointArgs):
    files: Mapping[str, bytes]


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Wait for the other processes of a save. Orbax also calls it while it handles the exception of a failed save."""
    # After a failure no other process reaches the barrier, and waiting would only hide the error.
    if sys.exception() is not None:
        raise
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


class _Manager(ocp.CheckpointManager):
    def reached_preemption(self, step: int) -> bool:
        """False: the trainer decides when to save. After a preemption Orbax subtracts the time of the step before,
        which `lightweight_initialize` does not read (TypeError)."""
        return False


@contextlib.contextmanager
def _fresh_listings() -> Iterator[None]:
    """By default gcsfs caches listings forever, even of folders that another client moves or deletes."""
    before = fsspec.config.conf.get("gcs")
    fsspec.config.conf["gcs"] = {"use_listings_cache": False, **(before or {})}
    try:
        yield
    finally:
        fsspec.config.conf.pop("gcs")
        if before is not None:
            fsspec.config.conf["gcs"] = before


def _manager(root: str, keep_every: int | None, keep_latest: int) -> ocp.CheckpointManager:
    """The manager that writes the steps under `root` and deletes the steps that need not be kept."""
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
    arrays = ocp.type_handlers.ArrayHandler(min_slice_bytes_for_replica_parallel=REPLICA_SLICE_BYTES)
    handlers = {
        "state": ocp.PyTreeCheckpointHandler(
            type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        ),
        "manifest": ocp.JsonCheckpointHandler(),
        FOLDER: _FilesHandler(),
    }
    return _Manager(root, options=options, item_handlers=handlers)
