"""Refuses a model that does not fit the memory of its devices, before the first array is allocated."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from mesh_transformer import accelerators, host_memory
from mesh_transformer.errors import UserError, set_options
from mesh_transformer.infer.engine import abstract_slots, working_bytes
from mesh_transformer.models.placement import Placement
from mesh_transformer.parallel.holdings import bytes_per_device
from mesh_transformer.runtime.session.session import Session

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

    @property
    def gib(self) -> float:
        """The memory in GiB."""
        return self.available / GIB

    def gib_of(self, parts: Mapping[str, float]) -> float:
        """GiB that the devices need together, given the GiB of each part on one device."""
        return self.devices * sum(parts.values())

    def listed(self, parts: Mapping[str, float]) -> str:
        """The GiB of each part on one device, such as `on each of 8 devices: parameters 1.0, cache 0.5`."""
        on_each = f"on each of {self.devices} devices: " if self.devices > 1 else ""
        return on_each + ", ".join(f"{name} {gib:,.1f}" for name, gib in parts.items())


def check_serving(session: Session, placement: Placement, slots: int, context: int | None) -> None:
    """Refuse parameters and a cache of `slots` sequences that do not fit. All processes must call this function.

    Raises:
        UserError: they do not fit.
    """
    fewer = "compute fewer sequences at a time (--slots, --num-samples), or " if slots > 1 else ""
    check(session, "the model", serving_arrays(placement, slots, context), fewer + _advice(session))


def check_scoring(session: Session) -> None:
    """Refuse parameters that do not fit. All processes must call this function.

    Raises:
        UserError: they do not fit.
    """
    check(session, "the model", _weights(session.whole_sequences), _advice(session))


def serving_arrays(placement: Placement, slots: int, context: int | None) -> dict[str, int]:
    """Bytes of the arrays of one device that exist as long as an engine. `context` as in `infer.engine.SlotEngine`."""
    return {
        **_weights(placement),
        "cache": bytes_per_device(abstract_slots(placement, slots, context)),
        "programs": working_bytes(placement, slots, context),
    }


def _weights(placement: Placement) -> dict[str, int]:
    """Bytes of the parameters of one device in the compute dtype."""
    return {"parameters": bytes_per_device(placement.abstract(placement.model.dtype))}


def _advice(session: Session) -> str:
    half = "compute.dtype=bfloat16, " if session.placement.model.dtype.itemsize > 2 else ""
    return f"use {half}a smaller model, or more memory over which mesh.tp or mesh.fsdp splits it"


def check(session: Session, what: str, arrays: Mapping[str, int], advice: str) -> Room | None:
    """Refuse arrays that do not fit. All processes must call this function.

    Args:
        what: what needs the arrays.
        arrays: the bytes of each on one device.
        advice: what to change.

    Returns:
        The memory. None: it is not known, or the check is off.

    Raises:
        UserError: they do not fit.
    """
    if not session.config.compute.memory_check:
        return None
    devices, process = session.placement.partition.devices.flat, jax.process_index()
    room = find_room([device for device in devices if device.process_index == process])
    if room is not None and room.devices * sum(arrays.values()) > room.available:
        parts = {name: n_bytes / GIB for name, n_bytes in arrays.items()}
        raise UserError(
            f"{what} does not fit: it needs at least {room.gib_of(parts):,.1f} GiB ({room.listed(parts)}), and "
            f"{room.limit} has {room.gib:,.1f} GiB left: {advice}; or go on with "
            f"{set_options('compute.memory_check=false')}"
        )
    return room


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
