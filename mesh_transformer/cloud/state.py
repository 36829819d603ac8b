"""The state of a TPU as the API reports it: phase, type, tier, addresses, labels."""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud.api import TpuError, from_status
from mesh_transformer.cloud.hosts import Host
from mesh_transformer.slices import counted


class TpuPhase(enum.Enum):
    """The life cycle of a TPU; each phase needs another reaction."""

    # wait until it is ready
    PENDING = "pending"
    READY = "ready"
    # its owner stopped it and can start it
    STOPPED = "stopped"
    # wait until it is deleted
    DELETING = "deleting"
    # preempted or failed: delete it and create another one
    LOST = "lost"


_NODE = {
    "READY": TpuPhase.READY, "DELETING": TpuPhase.DELETING, "PREEMPTED": TpuPhase.LOST, "TERMINATED": TpuPhase.LOST,
    "STOPPED": TpuPhase.STOPPED, "STOPPING": TpuPhase.STOPPED,
}  # fmt: skip
_QUEUED = {
    "FAILED": TpuPhase.LOST, "SUSPENDED": TpuPhase.LOST, "SUSPENDING": TpuPhase.DELETING, "DELETING": TpuPhase.DELETING,
    "ACTIVE": TpuPhase.READY,
}  # fmt: skip
_USABLE = {"HEALTH_UNSPECIFIED", "HEALTHY"}
# several slices have the first of these phases that one of them has
_PRECEDENCE = (TpuPhase.LOST, TpuPhase.DELETING, TpuPhase.STOPPED, TpuPhase.PENDING, TpuPhase.READY)


def phase_of(node: str | None, health: str, queued: str | None, *, spot: bool = False) -> TpuPhase:
    """The phase of a TPU that exists.

    Args:
        node: state of its node, a name of `Node.State`; None without a node.
        health: a name of `Node.Health`.
        queued: state of its queued resource, a name of `QueuedResourceState.State`; None without one.
        spot: whether it is a spot or preemptible TPU. Its state STOPPED means that Google preempted it.
    """
    in_queue = _QUEUED.get(queued, TpuPhase.PENDING) if queued is not None else TpuPhase.READY
    if in_queue in (TpuPhase.LOST, TpuPhase.DELETING):
        return in_queue
    if node is None or in_queue is TpuPhase.PENDING:
        return TpuPhase.PENDING
    phase = _NODE.get(node, TpuPhase.PENDING)
    if phase is TpuPhase.STOPPED and spot:
        return TpuPhase.LOST
    if phase is TpuPhase.READY and health not in _USABLE:
        return TpuPhase.PENDING
    return phase


@dataclass(frozen=True)
class Slice:
    """One slice of a TPU, which is a node of the API.

    Args:
        name: name of the node.
        internal: internal addresses of its hosts by TPU worker ID.
        external: external addresses; "" for a host without one.
    """

    name: str
    phase: TpuPhase
    internal: tuple[str, ...]
    external: tuple[str, ...]


@dataclass(frozen=True)
class Tpu:
    """A TPU as the API describes it: one slice, or the slices of one queued resource.

    Args:
        type: name of the type of each slice in the API.
        state: the state in the API's words, for messages.
        slices: in the order of their names.
        created: seconds since 1970; 0 if unknown.
        queued_name: full name of its queued resource.
        error: the error of its queued resource.
    """

    name: str
    type: str
    phase: TpuPhase
    state: str
    tier: str
    runtime_version: str
    slices: tuple[Slice, ...]
    labels: dict[str, str]
    created: float
    queued_name: str | None
    error: TpuError | None = None

    @property
    def size(self) -> str:
        """The type, such as v4-16, or 2xv4-16 for several slices."""
        return counted(self.type, len(self.slices))

    @property
    def external(self) -> tuple[str, ...]:
        """The external addresses of all hosts; "" for a host without one."""
        return tuple(address for tpu_slice in self.slices for address in tpu_slice.external)

    def hosts(self, *, external: bool = False) -> tuple[Host, ...]:
        """The hosts with internal or external addresses, by slice, then by TPU worker ID. A host's number counts over
        all slices."""
        several = len(self.slices) > 1
        addresses = [
            (slice_id if several else None, address)
            for slice_id, tpu_slice in enumerate(self.slices)
            for address in (tpu_slice.external if external else tpu_slice.internal)
        ]
        return tuple(Host(number, address, slice_id) for number, (slice_id, address) in enumerate(addresses))


def slice_names(queued: Any) -> tuple[str, ...]:
    """The names of the nodes of a `QueuedResource` of several slices. () for one slice.

    Source: `QueuedResource.Tpu.NodeSpec.MultisliceParams` of the API.
    """
    spec = queued.tpu.node_spec[0]
    if "multislice_params" not in spec:
        return ()
    params = spec.multislice_params
    prefix = params.node_id_prefix or queued.name.rsplit("/", 1)[-1]
    return tuple(f"{prefix}-{i}" for i in range(params.node_count))


def tpu_of(name: str, nodes: Sequence[Any | None], queued: Any | None) -> Tpu:
    """The `Tpu` of a `QueuedResource` of the API, if it has one, and of its nodes. A node that does not exist is None.

    Args:
        nodes: one, or those of `slice_names`.
    """
    first = next((node for node in nodes if node is not None), None)
    spec = first if first is not None else queued.tpu.node_spec[0].node  # type: ignore[union-attr]
    tier = _tier(first, queued)
    queued_state = queued.state.state.name if queued is not None else None
    names = (slice_names(queued) if queued is not None else ()) or (name,)
    slices = tuple(_slice_of(*pair, queued_state, tier) for pair in zip(names, nodes, strict=True))
    created = (queued if first is None or len(slices) > 1 else first).create_time  # type: ignore[union-attr]
    return Tpu(
        name=name,
        type=spec.accelerator_type,
        phase=min((tpu_slice.phase for tpu_slice in slices), key=_PRECEDENCE.index),
        state=_words(names, nodes, queued_state),
        tier=tier,
        runtime_version=spec.runtime_version,
        slices=slices,
        labels=dict(spec.labels),
        created=created.timestamp() if created else 0.0,
        queued_name=queued.name if queued is not None else None,
        error=_failure(name, queued),
    )


def _slice_of(name: str, node: Any | None, queued_state: str | None, tier: str) -> Slice:
    state, health = (None, "") if node is None else (node.state.name, node.health.name)
    endpoints = [] if node is None else list(node.network_endpoints)
    return Slice(
        name=name,
        phase=phase_of(state, health, queued_state, spot=tier in ("spot", "preemptible")),
        internal=tuple(endpoint.ip_address for endpoint in endpoints),
        external=tuple(endpoint.access_config.external_ip for endpoint in endpoints),
    )


def _words(names: Sequence[str], nodes: Sequence[Any | None], queued_state: str | None) -> str:
    """The state of the queued resource, then that of the nodes: once if all have the same, else of each."""
    states = []
    for node in nodes:
        usable = node is None or node.health.name in _USABLE
        states.append("" if node is None else node.state.name if usable else f"{node.state.name} ({node.health.name})")
    if len(set(states)) == 1:
        shown = states[:1]
    else:
        shown = [f"{name} {state or 'missing'}" for name, state in zip(names, states, strict=True)]
    return ", ".join(filter(None, (f"queue {queued_state}" if queued_state else "", *shown)))


def _tier(node: Any | None, queued: Any | None) -> str:
    if queued is not None:
        return "spot" if "spot" in queued else "reserved" if "guaranteed" in queued else "on-demand"
    scheduling = node.scheduling_config  # type: ignore[union-attr]
    tiers = [tier for tier in ("spot", "preemptible", "reserved") if getattr(scheduling, tier)]
    return tiers[0] if tiers else "on-demand"


def _failure(name: str, queued: Any | None) -> TpuError | None:
    if queued is None or queued.state.state.name != "FAILED":
        return None
    error = queued.state.failed_data.error
    return from_status(f"TPU {name} in the queue", error.code, error.message or "failed without a reason")
