"""The folder in which a run's first process writes metrics and plots. Of a run in a bucket it is a working copy. It belongs
to one process at a time."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from types import TracebackType
from typing import Any, Self

from mesh_transformer import files, liveness
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

METRICS, CURVE, RUN_ID = "metrics.jsonl", "loss.png", "run_id"
_TENSORBOARD = "tensorboard"
LOCK = "run.lock"
WAIT_S = 3.0  # for a process of this machine that was just killed
# for one of another machine: a file server frees the locks of a machine that is gone in some 90 s
REMOTE_WAIT_S = 120.0


class RunLock:
    """Holds the lock of `folder`, which is there, from `with` to its end. The kernel frees it when this process ends.

    On a file system without locks nothing is held.

    Raises:
        UserError: on entry, if another process holds it; the message says which one.
    """

    def __init__(self, folder: str):
        self._folder, self._path = folder, os.path.join(folder, LOCK)
        self._file = -1

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
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
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(record).encode(), 0)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._file)

    def still_in_place(self) -> bool:
        """Whether the folder is still the one that was locked: neither deleted nor moved away."""
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
                    f"{holder.get('host', '?')} has trained in it since {holder.get('since', '?')}. Wait for its end or stop "
                    f"it, or take another folder: --set checkpoint.model_dir=DIR"
                )
            with liveness.service_call():
                time.sleep(0.1)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            log.warning(
                "%s cannot be locked (%s): see to it that one run alone writes there", self._folder, error
            )
        return True

    def _holder(self) -> dict[str, Any]:
        """What the holder has recorded about itself; empty while it is about to."""
        try:
            record = json.loads(os.pread(self._file, 500, 0))
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
        raise UserError(
            f"checkpoint.model_dir {folder} cannot be written ({error}): choose another folder"
        ) from error


def check_shared(root: str) -> None:
    """See that a local `root` is one folder for all processes; a bucket is. All processes call it alike.

    Raises:
        UserError: some do not see what process 0 writes there.
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
            f"checkpoint.model_dir {root} is not one folder for all hosts: what process 0 writes there, processes "
            f"{blind} do not see (this is {socket.gethostname()}). Keep the run in a bucket "
            f"(--set checkpoint.bucket=NAME), or in a folder that all hosts mount"
        )


def claim_run_folder(root: str, folder: str) -> str:
    """Make `folder` ready for the run at `root`, the same folder or one in a bucket.

    What the bucket holds counts. A working copy of another run, such as one that was deleted in the bucket, is removed; one
    that is not the beginning of the bucket's metrics with more behind it has them replaced.

    Returns:
        A name for the run that survives restarts, for W&B.

    Raises:
        UserError: the bucket cannot be written.
    """
    path = os.path.join(folder, RUN_ID)
    own = _id_in(path)
    name = _id_in_bucket(root) if files.is_remote(root) else own or _new_id()
    if files.is_remote(root):
        if own != name:
            _remove(folder)
        _restore_metrics_from_bucket(files.join(root, METRICS), os.path.join(folder, METRICS))
    if own != name:
        files.replace(path, name.encode())
    return name


def publish(root: str, folder: str) -> None:
    """Copy metrics and plot to the bucket, if that is where the run is."""
    if not files.is_remote(root):
        return
    for name in (METRICS, CURVE):
        if os.path.exists(os.path.join(folder, name)):
            files.upload(os.path.join(folder, name), files.join(root, name))


def _id_in_bucket(root: str) -> str:
    from google.api_core.exceptions import ClientError

    path = files.join(root, RUN_ID)
    try:
        if not files.exists(path):
            files.replace(path, _new_id().encode())
        return _id_in(path)
    except ClientError as error:
        raise UserError(
            f"checkpoint.bucket: {root} cannot be written ({error.message}): name another bucket, or give this "
            f"machine's account the right to read and write it"
        ) from error


def _id_in(path: str) -> str:
    return files.read_range(path, 0, 64).strip().decode("ascii", "replace") if files.exists(path) else ""


def _new_id() -> str:
    return uuid.uuid4().hex[:8]


def _remove(folder: str) -> None:
    for name in (METRICS, CURVE):
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
    shutil.rmtree(os.path.join(folder, _TENSORBOARD), ignore_errors=True)


def _restore_metrics_from_bucket(remote: str, local: str) -> None:
    """Steps behind the newest copy in the bucket are in the local file alone: it stays if it begins like that."""
    if not files.exists(remote):
        return
    with files.open_binary(remote) as source:
        stored = source.read()
    if os.path.exists(local):
        with open(local, "rb") as file:
            if file.read(len(stored)) == stored:
                return
    files.replace(local, stored)
