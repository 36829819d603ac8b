"""The state of a TPU as the API reports it: phase, type, tier, addresses, labels."""

import enum
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud.api import TpuError, from_status
from mesh_transformer.cloud.hosts import Host


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
class Tpu:
    """A TPU as the API describes it.

    Args:
        type: name of the type in the API.
        state: the state in the API's words, for messages.
        internal: internal addresses by TPU worker ID.
        external: external addresses; "" for a host without one.
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
    internal: tuple[str, ...]
    external: tuple[str, ...]
    labels: dict[str, str]
    created: float
    queued_name: str | None
    error: TpuError | None = None

    def hosts(self, *, external: bool = False) -> tuple[Host, ...]:
        """The hosts by TPU worker ID, with internal or external addresses."""
        addresses = self.external if external else self.internal
        return tuple(Host(worker_id, address) for worker_id, address in enumerate(addresses))


def tpu_of(name: str, node: Any | None, queued: Any | None) -> Tpu:
    """The `Tpu` of a `Node` and a `QueuedResource` of the API. One of them may be None."""
    spec = node if node is not None else queued.tpu.node_spec[0].node  # type: ignore[union-attr]
    tier = _tier(node, queued)
    node_state = node.state.name if node is not None else None
    health = node.health.name if node is not None else ""
    queued_state = queued.state.state.name if queued is not None else None
    words = [f"queue {queued_state}" if queued_state else "", node_state or ""]
    words += [] if health in _USABLE else [health]
    created = (node if node is not None else queued).create_time  # type: ignore[union-attr]
    endpoints = list(node.network_endpoints) if node is not None else []
    return Tpu(
        name=name,
        type=spec.accelerator_type,
        phase=phase_of(node_state, health, queued_state, spot=tier in ("spot", "preemptible")),
        state=", ".join(word for word in words if word),
        tier=tier,
        runtime_version=spec.runtime_version,
        internal=tuple(endpoint.ip_address for endpoint in endpoints),
        external=tuple(endpoint.access_config.external_ip for endpoint in endpoints),
        labels=dict(spec.labels),
        created=created.timestamp() if created else 0.0,
        queued_name=queued.name if queued is not None else None,
        error=_failure(name, queued),
    )


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
