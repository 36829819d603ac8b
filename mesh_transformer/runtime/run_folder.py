"""The folder in which a run's first process writes metrics and plots. Of a run in a bucket it is a working copy."""

import contextlib
import os
import shutil
import socket
import tempfile
import uuid

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import files
from mesh_transformer.errors import UserError

METRICS, CURVE, RUN_ID = "metrics.jsonl", "loss.png", "run_id"
_TENSORBOARD = "tensorboard"


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


def take_up(root: str, folder: str) -> str:
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
        _go_on_with(files.join(root, METRICS), os.path.join(folder, METRICS))
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


def _go_on_with(remote: str, local: str) -> None:
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
