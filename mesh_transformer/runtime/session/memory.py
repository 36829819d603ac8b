"""Refuses a model that does not fit the memory of its devices, before the first array is allocated."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import accelerators, host_memory
from mesh_transformer.errors import UserError
from mesh_transformer.estimate import closed_form, memory, serving, sizes
from mesh_transformer.logs import log
from mesh_transformer.models.placement import Placement
from mesh_transformer.runtime.session.session import Session

# a server imports nothing of the training
if TYPE_CHECKING:
    from mesh_transformer.train.step import TrainProgram

GIB = 2**30


class Room(NamedTuple):
    """Memory in which the arrays of some devices must fit.

    Args:
        available: bytes.
        devices: the devices that share it.
        limit: what limits it.
    """

    available: int
    devices: int
    limit: str


def check_training(session: Session, program: TrainProgram) -> None:
    """Refuse a run whose state and gradients do not fit, and warn of one whose estimated step does not. All processes must
    call this function.

    Raises:
        UserError: the arrays that must exist do not fit.
    """
    arrays = memory.training_arrays(program)
    advice = "use a smaller model, or split it over more memory (mesh.fsdp)"
    if 2 * arrays["moments"] > arrays["parameters"]:
        advice += ", or store less for each parameter (optimizer.name=adafactor)"
    room = _check(session, "training", arrays, advice)
    if room is None or jax.process_index() > 0 or sizes.unmodelled(session.config):
        return
    resolved = session.config.model_copy(update={"compute": program.model.compute})
    uses = closed_form.step_gib(resolved, len(program.partition.mesh.devices.flat))
    needed = room.devices * sum(uses.values())
    if needed > room.available / GIB:
        log.warning(
            "a step may not fit: it needs about %.1f GiB by the closed form of preflight (%s%s), and %s has %.1f GiB left; if "
            "it does not fit, use a smaller batch with more optimizer.gradient_accumulation_steps, or compute.remat=full",
            *(needed, _on_each(room.devices), _listed(uses), room.limit, room.available / GIB),
        )


def check_serving(session: Session, placement: Placement, slots: int, context: int | None) -> None:
    """Refuse parameters and a cache of `slots` sequences that do not fit. All processes must call this function.

    Raises:
        UserError: they do not fit.
    """
    fewer = "compute fewer sequences at a time (--slots, --num-samples), or " if slots > 1 else ""
    _check(session, "the model", serving.serving_arrays(placement, slots, context), fewer + _advice(session))


def check_scoring(session: Session) -> None:
    """Refuse parameters that do not fit. All processes must call this function.

    Raises:
        UserError: they do not fit.
    """
    _check(session, "the model", memory.weights(session.whole_sequences), _advice(session))


def _advice(session: Session) -> str:
    half = "compute.dtype=bfloat16, " if session.placement.model.dtype.itemsize > 2 else ""
    return f"use {half}a smaller model, or more memory over which mesh.tp or mesh.fsdp splits it"


def _check(session: Session, what: str, arrays: Mapping[str, int], advice: str) -> Room | None:
    """Raise UserError if arrays of these bytes on each device do not fit. Returns the memory, if it is known and the check
    is on."""
    if not session.config.compute.memory_check:
        return None
    room = find_room(session.placement.partition.mesh.local_devices)
    if room is not None and room.devices * sum(arrays.values()) > room.available:
        parts = {name: n_bytes / GIB for name, n_bytes in arrays.items()}
        raise UserError(
            f"{what} does not fit: it needs at least {room.devices * sum(parts.values()):,.1f} GiB "
            f"({_on_each(room.devices)}{_listed(parts)}), and {room.limit} has {room.available / GIB:,.1f} GiB left: "
            f"{advice}; or go on with --set compute.memory_check=false"
        )
    return room


def _on_each(devices: int) -> str:
    return f"on each of {devices} devices: " if devices > 1 else ""


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {gib:,.1f}" for name, gib in parts.items())


def find_room(devices: Sequence[jax.Device]) -> Room | None:
    """The memory for the arrays of these devices, which are all of this process. None: it is not known.

    A GPU or a TPU has its own memory. The CPU devices of all processes of a machine share the machine's memory.
    """
    if devices[0].platform == "cpu":
        host = host_memory.available()
        # all processes must take part
        return _shared(host, len(devices))
    found = [size for size in map(_own_bytes, devices) if size is not None]
    return Room(min(found), 1, f"a device ({devices[0].device_kind})") if found else None


def _own_bytes(device: jax.Device) -> int | None:
    """Bytes that the allocator of a device manages, or else that the table of accelerators gives."""
    if limit := (device.memory_stats() or {}).get("bytes_limit"):
        return int(limit)
    known = accelerators.of_device(device.device_kind)
    return None if known is None else round(known.usable_gib * GIB)


def _shared(host: host_memory.HostMemory | None, devices: int) -> Room | None:
    """The memory of this machine, with the devices of all processes of the job that share it."""
    if jax.process_count() == 1:
        return None if host is None else Room(host.available, devices, host.limit)
    # jax has no 64-bit integers here, so that each process sends its row as bytes
    pool = hashlib.sha256((host.pool if host else "").encode()).digest()[:8]
    available = host.available if host else -1
    row = np.frombuffer(pool + np.array([available, devices], np.int64).tobytes(), np.uint8)
    rows = [bytes(one) for one in multihost_utils.process_allgather(row)]
    if host is None:
        return None
    # every process has read its memory before the first one allocates any
    sharing = [np.frombuffer(one[8:], np.int64) for one in rows if one[:8] == pool]
    return Room(min(int(left) for left, _ in sharing), sum(int(count) for _, count in sharing), host.limit)
