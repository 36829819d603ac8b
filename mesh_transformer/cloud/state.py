"""What a TPU's state means for somebody who wants to use it: pure functions of what the API says."""

import enum
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud.faults import Fault, from_status
from mesh_transformer.cloud.pod import Host


class Phase(enum.Enum):
    """What there is to do about a TPU."""

    COMING = "coming"  # wait
    READY = "ready"  # use it
    STOPPED = "stopped"  # by its owner; it can be started
    GOING = "going"  # wait until it is gone
    LOST = "lost"  # preempted or failed: delete it, make another


_NODE = {
    "READY": Phase.READY, "DELETING": Phase.GOING, "PREEMPTED": Phase.LOST, "TERMINATED": Phase.LOST,
    "STOPPED": Phase.STOPPED, "STOPPING": Phase.STOPPED,
}  # fmt: skip
_QUEUED = {
    "FAILED": Phase.LOST, "SUSPENDED": Phase.LOST, "SUSPENDING": Phase.GOING, "DELETING": Phase.GOING,
    "ACTIVE": Phase.READY,
}  # fmt: skip
_USABLE = {"HEALTH_UNSPECIFIED", "HEALTHY"}


def phase_of(node: str | None, health: str, queued: str | None, *, spot: bool = False) -> Phase:
    """The phase of a TPU that exists.

    Args:
        node: state of its node, as `Node.State` names it; None while there is no node.
        health: as `Node.Health` names it.
        queued: state of its queued resource, as `QueuedResourceState.State` names it; None if it has none.
        spot: it is a spot or preemptible one, of which STOPPED, too, means that Google took it.
    """
    waiting = _QUEUED.get(queued, Phase.COMING) if queued is not None else Phase.READY
    if waiting in (Phase.LOST, Phase.GOING):
        return waiting
    if node is None or waiting is Phase.COMING:
        return Phase.COMING
    phase = _NODE.get(node, Phase.COMING)
    if phase is Phase.STOPPED and spot:
        return Phase.LOST
    if phase is Phase.READY and health not in _USABLE:
        return Phase.COMING
    return phase


@dataclass(frozen=True)
class Tpu:
    """A TPU as the API describes it."""

    name: str
    type: str  # as the API spells it
    phase: Phase
    state: str  # in the API's words, for people
    tier: str
    runtime_version: str
    internal: tuple[str, ...]  # addresses by TPU worker id
    external: tuple[str, ...]  # the same, "" where a host has none
    labels: dict[str, str]
    created: float  # seconds since 1970; 0: not known
    queued_name: str | None  # full name of its queued resource
    why: Fault | None = None  # what the queue says about its failure

    def hosts(self, *, external: bool = False) -> tuple[Host, ...]:
        """The hosts by TPU worker id, with internal or external addresses."""
        addresses = self.external if external else self.internal
        return tuple(Host(worker_id, address) for worker_id, address in enumerate(addresses))


def observe(name: str, node: Any | None, queued: Any | None) -> Tpu:
    """The `Tpu` that a `Node` and a `QueuedResource` (not both None) of the API describe."""
    spec = node if node is not None else queued.tpu.node_spec[0].node  # type: ignore[union-attr]
    tier = _tier(node, queued)
    node_state = node.state.name if node is not None else None
    health = node.health.name if node is not None else ""
    queued_state = queued.state.state.name if queued is not None else None
    words = [f"queue {queued_state}" if queued_state else "", node_state or ""]
    if health not in _USABLE | {""}:
        words.append(health)
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
        why=_failure(name, queued),
    )


def _tier(node: Any | None, queued: Any | None) -> str:
    if queued is not None:
        return "spot" if "spot" in queued else "reserved" if "guaranteed" in queued else "on-demand"
    scheduling = node.scheduling_config  # type: ignore[union-attr]
    tiers = [tier for tier in ("spot", "preemptible", "reserved") if getattr(scheduling, tier)]
    return tiers[0] if tiers else "on-demand"


def _failure(name: str, queued: Any | None) -> Fault | None:
    if queued is None or queued.state.state.name != "FAILED":
        return None
    error = queued.state.failed_data.error
    return from_status(f"TPU {name} in the queue", error.code, error.message or "failed without a reason")
