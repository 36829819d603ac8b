"""How we use Orbax: names of steps, chunks, what is kept."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import fsspec
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from mesh_transformer.checkpoint import classic_folder
from mesh_transformer.checkpoint.chunks import CHUNK_BYTES
from mesh_transformer.errors import is_disk_full

SAVE_TIMEOUT_S = 3600


class _StepNames:
    """Orbax's `step_N`, without the folders of the original program: Orbax would count them and delete them."""

    def __init__(self) -> None:
        self._standard = ocp.path.step.standard_name_format(
            step_prefix="step", single_host_load_and_broadcast=True
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._standard, name)

    def find_all(self, base_path: Any) -> Iterator[Any]:
        return iter(
            [m for m in self._standard.find_all(base_path) if not classic_folder.is_step(str(m.path))]
        )


def _is_no_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR


def _is_no_full_disk(record: logging.LogRecord) -> bool:
    return not (record.exc_info and is_disk_full(record.exc_info[1]))


def _complain(unraisable: sys.UnraisableHookArgs) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        _complain_of_others(unraisable)


_complain_of_others = sys.unraisablehook


def quieten() -> None:
    """Leave out of the log what Orbax tells of each file, and what its threads tell of a save that fails: it is raised."""
    for library in ("absl", "fsspec"):
        logging.getLogger(library).setLevel(logging.WARNING)
    logging.getLogger("absl").addFilter(_is_no_error)
    # one write's failure is raised; asyncio tells of each of the others
    logging.getLogger("asyncio").addFilter(_is_no_full_disk)
    # writes of TensorStore that end after one has failed do not find Orbax's event loop any more
    sys.unraisablehook = _complain


def save_args(leaf: Any) -> ocp.SaveArgs:
    """Matrices layer by layer and in small chunks, so that a slice is read without the whole tensor."""
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if np.ndim(leaf) == 3 else ())


def _barrier(*, key: str, timeout_ms: int) -> None:
    """Wait for the other processes of a save. Orbax calls it after a failure too, while it handles the exception."""
    # No other process reaches the barrier of a failure: the wait would only hide the error.
    if sys.exception() is not None:
        raise
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def manager(root: str, keep_every: int | None, keep_latest: int) -> ocp.CheckpointManager:
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
