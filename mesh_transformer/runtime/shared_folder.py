"""Whether all processes of a job see one and the same folder."""

from __future__ import annotations

import os
import socket
import uuid

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import files
from mesh_transformer.errors import UserError


def check_shared(root: str) -> None:
    """See that a local `root` is one folder for all processes; a bucket is. All processes call it alike.

    Raises:
        UserError: some do not see what process 0 writes there.
    """
    if jax.process_count() == 1 or files.is_remote(root):
        return
    token = np.frombuffer(uuid.uuid4().bytes, np.uint8).astype(np.int32)
    token = np.asarray(multihost_utils.broadcast_one_to_all(token))
    path = os.path.join(root, f".shared-{bytes(token.astype(np.uint8)).hex()}")
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
