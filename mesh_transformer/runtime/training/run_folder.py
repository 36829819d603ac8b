"""The local folder in which process 0 of a run writes metrics and plots. Only one process may use it at a time.

For a run in a bucket, the folder is a working copy of the files in the bucket.
"""

import contextlib
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mesh_transformer import files, liveness
from mesh_transformer.errors import UserError, byte_size, set_options
from mesh_transformer.logs import log

METRICS, CURVE, RUN_ID = "metrics.jsonl", "loss.png", "run_id"
# the load of the experts at each validation, and its picture
EXPERTS, EXPERTS_PICTURE = "experts.jsonl", "experts.png"
# the samples of the prompts of logging.sample_prompts
SAMPLES = "samples.jsonl"
# the files with one record a step, which a resumed run continues
_RECORDS = (METRICS, EXPERTS, SAMPLES)
_PUBLISHED = (*_RECORDS, CURVE, EXPERTS_PICTURE)
PROFILE = "profile"
_TENSORBOARD = "tensorboard"
LOCK = "run.lock"
# child processes do not get the file, and a link to another file is refused; Windows has neither flag
_ONLY_HERE = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
# time for the kernel to free the lock of a process of this machine that was killed
WAIT_S = 3.0
# time for file servers to free the lock of a process of a dead machine: about 90 s
REMOTE_WAIT_S = 120.0


class RunLock:
    """A context manager that locks an existing folder. The kernel frees the lock when this process ends.

    On a file system or an operating system without such locks, it only logs a warning.

    Raises:
        UserError: on entry, if another process holds the lock. The message names the process.
    """

    def __init__(self, folder: str):
        self._folder, self._path = folder, os.path.join(folder, LOCK)
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | _ONLY_HERE, 0o644)
        try:
            self._acquire()
        except BaseException:
            os.close(self._file)
            raise
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        # the lock does not need this record, so a full disk is no error
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, json.dumps(record).encode())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)

    def still_in_place(self) -> bool:
        """Whether the locked folder is still at its path: it was neither deleted nor moved."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _acquire(self) -> None:
        began = time.monotonic()
        while not self._try_lock():
            holder = self._holder()
            remote = holder.get("host", socket.gethostname()) != socket.gethostname()
            if time.monotonic() - began > (REMOTE_WAIT_S if remote else WAIT_S):
                raise UserError(
                    f"checkpoint.model_dir {self._folder} is in use: process {holder.get('pid', '?')} on host "
                    f"{holder.get('host', '?')} has used it since {holder.get('since', '?')}. Wait for this process or "
                    f"stop it, or use another folder: --set checkpoint.model_dir=DIR"
                )
            with liveness.service_call():
                time.sleep(0.1)

    def _try_lock(self) -> bool:
        try:
            # Windows does not have it
            import fcntl

            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except (OSError, ImportError) as error:
            log.warning("%s cannot be locked (%s): make sure that only one run writes to it", self._folder, error)
        return True

    def _holder(self) -> dict[str, Any]:
        """The record that the holder of the lock wrote about itself. Empty if it has not written it yet."""
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            record = json.loads(os.read(self._file, 500))
        except (ValueError, RecursionError):
            return {}
        return record if isinstance(record, dict) else {}


def check_writable(folder: str) -> None:
    """Make `folder` if it is missing.

    Raises:
        UserError: it cannot be written.
    """
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"checkpoint.model_dir {folder} is not writable ({error}): use another folder") from error


def warn_of_little_space(folder: str, checkpoint: int, steps: int, keep_latest: int) -> None:
    """Log a warning if the disk has no room for the checkpoints that exist during a save: `keep_latest`, and the one
    that is written.

    Args:
        folder: the folder of a local run, which has `steps` checkpoints.
        checkpoint: size of a checkpoint, bytes.
    """
    free, copies = shutil.disk_usage(folder).free, keep_latest + 1
    needed = checkpoint * (copies - min(steps, keep_latest))
    if free < needed:
        newest = f", or keep only the newest: {set_options('checkpoint.keep_latest=1')}"
        fewer = "" if keep_latest == 1 else newest
        log.warning(
            "a save may fill the disk: it needs room for %d checkpoints of %s (checkpoint.keep_latest %d), of which %s "
            "are still to be written, and %s has %s free: free some space%s",
            *(copies, byte_size(checkpoint), keep_latest, byte_size(needed), folder, byte_size(free), fewer),
        )


def check_shared(root: str) -> None:
    """Check that all processes see the same local folder `root`. All processes must call this function.

    Raises:
        UserError: some processes do not see a file that process 0 writes there.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1 or files.is_remote(root):
        return
    token = multihost_utils.broadcast_one_to_all(np.frombuffer(os.urandom(8), np.int32))
    path = os.path.join(root, f".shared-{bytes(np.asarray(token)).hex()}")
    if jax.process_index() == 0:
        files.replace(path, b"")
    multihost_utils.sync_global_devices("mesh_transformer: shared folder written")
    seen = multihost_utils.process_allgather(np.bool_(os.path.exists(path)))
    if jax.process_index() == 0:
        os.remove(path)
    if not np.all(seen):
        blind = np.flatnonzero(~np.asarray(seen)).tolist()
        raise UserError(
            f"checkpoint.model_dir {root} is not shared by all hosts: processes {blind} do not see a file that process "
            f"0 writes there (this is {socket.gethostname()}). Use a bucket (--set checkpoint.bucket=NAME), or a "
            f"folder that all hosts mount"
        )


def claim_run_folder(root: str, folder: str) -> str:
    """Prepare `folder` for the run at `root`, which is the same folder or one in a bucket.

    The bucket is authoritative. A working copy of another run, such as one that was deleted in the bucket, is removed.
    Local metrics that do not start with the bucket's metrics are replaced by these.

    Returns:
        An ID of the run that restarts keep, for W&B.

    Raises:
        UserError: the bucket is not writable.
    """
    path = os.path.join(folder, RUN_ID)
    local_id = _id_in(path)
    name = _id_in_bucket(root) if files.is_remote(root) else local_id or _new_id()
    if files.is_remote(root):
        if local_id != name:
            _remove(folder)
        for file in _RECORDS:
            _restore_metrics_from_bucket(files.join(root, file), os.path.join(folder, file))
    if local_id != name:
        files.replace(path, name.encode())
    return name


def publish(root: str, folder: str) -> None:
    """Copy the metrics and the plots to the bucket, if the run is in a bucket."""
    _publish(root, folder, (Path(folder, name) for name in _PUBLISHED))


def publish_profile(root: str, folder: str) -> None:
    """Copy the traces in `folder` to the bucket, if the run is in a bucket."""
    _publish(root, folder, Path(folder, PROFILE).rglob("*"))


def _publish(root: str, folder: str, paths: Iterable[Path]) -> None:
    for path in paths if files.is_remote(root) else ():
        if path.is_file():
            files.upload(str(path), files.join(root, *path.relative_to(folder).parts))


def _id_in_bucket(root: str) -> str:
    from google.api_core.exceptions import ClientError

    path = files.join(root, RUN_ID)
    try:
        if not files.exists(path):
            files.replace(path, _new_id().encode())
        return _id_in(path)
    except ClientError as error:
        raise UserError(
            f"checkpoint.bucket: {root} is not writable ({error.message}): use another bucket, or give the account of "
            f"this machine the permission to read and write it"
        ) from error


def _id_in(path: str) -> str:
    return files.read_range(path, 0, 64).strip().decode("ascii", "replace") if files.exists(path) else ""


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def _remove(folder: str) -> None:
    for name in _PUBLISHED:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
    for name in (_TENSORBOARD, PROFILE):
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _restore_metrics_from_bucket(remote: str, local: str) -> None:
    """Replace the local metrics by the metrics in the bucket, unless the local metrics continue them."""
    if not files.exists(remote):
        return
    with files.open_binary(remote) as source:
        stored = source.read()
    if os.path.exists(local):
        with open(local, "rb") as file:
            if file.read(len(stored)) == stored:
                return
    files.replace(local, stored)
