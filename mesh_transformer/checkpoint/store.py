"""Checkpoints of a run: asynchronous, atomic, restorable on any mesh, local or on `gs://`. Orbax underneath.

    {root}/step_1000/state/      the tensors (OCDBT)
    {root}/step_1000/manifest/   shapes, dtypes, checksums and the caller's JSON: see manifest.py
    {root}/set_aside/step_1000/  what a later save found in its way: damaged, or of an abandoned branch of the run

A step is finished once its folder was renamed from its temporary name (local) or holds `commit_success.txt`
(`gs://`, where nothing can be renamed). Other files under the root are never read or deleted. One run writes to a
root at a time; any number may read.

Several processes: the root must be one shared folder, and all processes call every method alike. Process 0 lists the
folder and the others take its list. Each reads the manifest and its own shards, then all exchange whether they could:
if one failed, all fail, and all turn to the same earlier step.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import fsspec
import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint.checkpoint_managers import preservation_policy

from mesh_transformer import files
from mesh_transformer.checkpoint import manifest as manifests
from mesh_transformer.checkpoint.manifest import DamagedCheckpoint, Manifest
from mesh_transformer.errors import UserError

T = TypeVar("T")
log = logging.getLogger(__name__)

COMMIT_MARKER = "commit_success.txt"
TEMPORARY = ".orbax-checkpoint-tmp"
SAVE_TIMEOUT_S = 3600


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
    ) -> None:
        """Open `root`, which need not exist; unless `read_only`, make it and delete what broken-off saves left."""
        for library in ("absl", "fsspec"):  # Orbax and its file access tell of every file at INFO
            logging.getLogger(library).setLevel(logging.WARNING)
        self._root = root if files.is_remote(root) else os.path.abspath(root)
        self._keep = (keep_every, keep_latest)
        self._save_failed = False
        self._damaged: set[int] = set()  # steps that `restore` passed over
        self._manager = None if read_only else self._open()

    def steps(self) -> list[int]:
        """The finished steps, ascending, as they are on the disk now."""
        return sorted(
            int(match[1])
            for name in files.list_dir(self._root)
            if (match := re.fullmatch(r"step_(\d+)", name)) and self._finished(name)
        )

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
        document = manifests.encode(manifests.describe(state, extra))
        self._set_aside([old for old in manager.all_steps() if old >= step or old in self._damaged])
        self._damaged.clear()
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), manifest=ocp.args.JsonSave(document))
        manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Return when no save is under way.

        Raises:
            Exception: what made the save fail; the steps before it are untouched.
        """
        if self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception:
            self._save_failed = True
            raise

    def restore(self, abstract_state: Any, step: int | None = None) -> Checkpoint | None:
        """Read a state onto the shardings of `abstract_state`, a pytree of `jax.ShapeDtypeStruct` with sharding.

        Without `step`: the newest that is whole, or None if there is none at all. A damaged one is passed over with
        a warning.

        Raises:
            UserError: the checkpoint is of another model; the `step` asked for is absent or damaged; all are damaged.
        """
        return self._restore(abstract_state, step, part=False)

    def restore_part(self, abstract_part: Any, step: int | None = None) -> Checkpoint | None:
        """As `restore`, but only the tensors that `abstract_part` names, such as `{"params": ...}`."""
        return self._restore(abstract_part, step, part=True)

    def close(self) -> None:
        """Finish the save under way and release the threads.

        Raises:
            Exception: what made the save fail.
        """
        try:
            self.wait()
        finally:
            self._discard()

    def _restore(self, abstract: Any, step: int | None, *, part: bool) -> Checkpoint | None:
        self.wait()
        tried: dict[int, str] = {}
        while (candidate := self._candidate(step, tried)) is not None:
            try:
                return self._load(candidate, abstract, part=part)
            except DamagedCheckpoint as damage:
                tried[candidate] = str(damage)
                self._damaged.add(candidate)
                if step is None:
                    log.warning(
                        "checkpoint step %d in %s is damaged, passed over: %s", candidate, self._root, damage
                    )
        if tried:
            raise UserError(
                f"no checkpoint in {self._root} can be restored:\n"
                + "\n".join(f"  step {number}: {reason}" for number, reason in tried.items())
                + "\nname another step, or choose another model_dir to start afresh"
            )
        if step is not None:
            raise UserError(
                f"no checkpoint of step {step} in {self._root}: there are {self.steps() or 'none'}"
            )
        return None

    def _candidate(self, step: int | None, tried: dict[int, str]) -> int | None:
        """The newest finished step not tried yet (or `step`), as process 0 sees it."""
        there = [number for number in self.steps() if number not in tried and step in (None, number)]
        newest = int(multihost_utils.broadcast_one_to_all(np.int32(max(there, default=-1))))
        return None if newest < 0 else newest

    def _load(self, step: int, abstract: Any, *, part: bool) -> Checkpoint:
        folder = files.join(self._root, f"step_{step}")
        manifest = _agreed(lambda: _read_manifest(folder))
        manifests.check_fits(manifest, abstract, part=part, where=f"checkpoint step {step} in {self._root}")
        state = _agreed(lambda: _read_tensors(files.join(folder, "state"), abstract, part=part))
        manifests.verify(manifest, state)
        return Checkpoint(step, state, manifest.extra)

    def _open(self) -> ocp.CheckpointManager:
        self._delete_unfinished()
        return _manager(self._root, *self._keep)

    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            raise RuntimeError("this checkpoint store is read-only or closed")
        if (
            self._save_failed
        ):  # Orbax would raise that error again, and has crossed out steps that still exist
            self._discard()
            self._manager, self._save_failed = self._open(), False
        return self._manager

    def _discard(self) -> None:
        manager, self._manager = self._manager, None
        try:
            if manager is not None:
                manager.close()
        except Exception:
            if not self._save_failed:  # otherwise `wait` has raised it
                raise

    def _finished(self, name: str) -> bool:
        return not files.is_remote(self._root) or files.exists(files.join(self._root, name, COMMIT_MARKER))

    def _delete_unfinished(self) -> None:
        """Process 0 only; the manager's construction waits for it. Orbax's own clean-up would take every folder
        without a commit marker on gs://, such as tensorboard/."""
        for name in files.list_dir(self._root) if jax.process_index() == 0 else ():
            match = re.fullmatch(rf"step_\d+({re.escape(TEMPORARY)}.*)?", name)
            if match and (match[1] or not self._finished(name)):
                files.remove_tree(files.join(self._root, name))

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        for step in steps if jax.process_index() == 0 else ():
            target = _unused(files.join(self._root, "set_aside"), f"step_{step}")
            log.warning("checkpoint step %d in %s is in the way: moved to %s", step, self._root, target)
            files.move_tree(files.join(self._root, f"step_{step}"), target)
        multihost_utils.sync_global_devices("mesh_transformer: set aside")
        self._writer().reload()


def _manager(root: str, keep_every: int | None, keep_latest: int) -> ocp.CheckpointManager:
    policies: list[Any] = [preservation_policy.LatestN(keep_latest)]
    if keep_every is not None:
        policies.append(preservation_policy.EveryNSteps(keep_every))
    options = ocp.CheckpointManagerOptions(
        step_prefix="step",
        preservation_policy=preservation_policy.AnyPreservationPolicy(policies),
        single_host_load_and_broadcast=True,
        save_root_metadata=False,
        lightweight_initialize=True,
        async_options=ocp.AsyncOptions(timeout_secs=SAVE_TIMEOUT_S),
    )
    # gcsfs remembers listings for ever, also of folders that were moved or deleted by other means than itself
    fsspec.config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    handlers = {"state": ocp.PyTreeCheckpointHandler(), "manifest": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(root, options=options, item_handlers=handlers)


def _read_manifest(folder: str) -> Manifest:
    with files.open_binary(files.join(folder, "manifest", "metadata")) as file:
        return manifests.decode(json.loads(file.read()))


def _read_tensors(folder: str, abstract: Any, *, part: bool) -> Any:
    """Each device's part of each tensor, straight to the device."""
    handler = ocp.PyTreeCheckpointHandler()
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    args = ocp.args.PyTreeRestore(abstract, restore_args=restore_args, partial_restore=part)
    try:
        return jax.block_until_ready(handler.restore(epath.Path(folder), args=args))
    finally:
        handler.close()


def _agreed(read: Callable[[], T]) -> T:
    """The result of `read`, if it succeeded in every process.

    Raises:
        DamagedCheckpoint: it failed in this process or in another.
    """
    reason = ""
    try:
        result = read()
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # the machine's fault, not the checkpoint's
    except Exception as error:  # noqa: BLE001  (Orbax and TensorStore raise all sorts for a damaged file)
        reason = _first_cause(error)
    failed = multihost_utils.process_allgather(np.bool_(reason))
    if np.any(failed):
        raise DamagedCheckpoint(reason or f"unreadable in processes {np.flatnonzero(failed).tolist()}")
    return result


def _first_cause(error: BaseException) -> str:
    """The first line of the innermost error, without TensorStore's dump of its settings."""
    ours = (DamagedCheckpoint, UserError)
    while error.__cause__ is not None and not isinstance(error, ours):
        error = error.__cause__
    text = str(error).partition(" [tensorstore_spec")[0].partition("\n")[0]
    return text if isinstance(error, ours) else f"{type(error).__name__}: {text}"[:500]


def _unused(folder: str, name: str) -> str:
    taken = set(files.list_dir(folder))
    names = (name if not n else f"{name}.{n}" for n in range(len(taken) + 1))
    return files.join(folder, next(candidate for candidate in names if candidate not in taken))
