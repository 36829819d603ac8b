"""TPU VMs and queued resources of one project and zone: make, find, list, wait for, delete. Everything may be repeated."""

import enum
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud import api
from mesh_transformer.cloud.api import Fault, Kind, Timing, TpuFailed, TpuRefused, call, explained, fault
from mesh_transformer.cloud.pod import Host
from mesh_transformer.cloud.request import Request
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)
DAY_S = 24 * 3600.0


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
    return api.from_status(f"TPU {name} in the queue", error.code, error.message or "failed without a reason")


class Tpus:
    """The TPUs of a project in a zone.

    Args:
        zone: such as europe-west4-a.
        project: None means the environment's (`project_of`).
        client: a `TpuClient`; None makes one (`connect`).
        timing: of calls and of looks at states.

    Raises:
        UserError: the zone cannot be one, no project is known, or there are no credentials.
    """

    def __init__(
        self, zone: str, project: str | None = None, client: Any | None = None, timing: Timing | None = None
    ):
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", zone):
            raise UserError(f"{zone!r} is no zone: give one such as europe-west4-a")
        self.zone = zone
        self.project = api.project_of(project)
        self.timing = timing or Timing()
        self.parent = f"projects/{self.project}/locations/{zone}"
        self._client = client or api.connect()

    def find(self, name: str) -> Tpu | None:
        """The TPU of that name, queued or made; None if there is none."""
        doing = f"looking for TPU {name}"
        node = self._get(self._client.get_node, self._node_name(name), doing)
        queued_name = (node and node.queued_resource) or f"{self.parent}/queuedResources/{name}"
        queued = self._get(self._client.get_queued_resource, queued_name, doing)
        return None if node is None and queued is None else observe(name, node, queued)

    def describe(self, name: str) -> Tpu:
        """The TPU of that name.

        Raises:
            TpuRefused: there is none.
        """
        found = self.find(name)
        if found is None:
            raise fault(f"TPU {name}", Kind.NOT_FOUND, f"there is none in {self.zone} of {self.project}")
        return found

    def all(self) -> list[Tpu]:
        """All TPUs, made or queued, by name."""
        doing = f"listing the TPUs of {self.zone}"
        client = self._client
        with explained(doing):  # the further pages too
            made, entries = (
                list(call(method, doing, self.timing, parent=self.parent))
                for method in (client.list_nodes, client.list_queued_resources)
            )
        nodes = {_last(node.name): node for node in made}
        queued = {
            spec.node_id or _last(entry.name): entry for entry in entries for spec in entry.tpu.node_spec[:1]
        }
        return [observe(name, nodes.get(name), queued.get(name)) for name in sorted(nodes | queued)]

    def create(self, request: Request, timeout_s: float = DAY_S) -> Tpu:
        """Make a TPU, or join the wait for one of that name that is being made; returns once it is ready.

        Raises:
            UserError: there is one of that name that is of another type or tier.
            TpuRefused, TpuFailed: the API's reason, or not ready in time.
        """
        return self._obtain(request, time.monotonic() + timeout_s, again=False)

    def ensure(self, request: Request, timeout_s: float = DAY_S) -> Tpu:
        """Like `create`, but a TPU that was preempted, suspended or failed is deleted and made again, and lack of capacity
        is waited out, with growing pauses, until `timeout_s`."""
        return self._obtain(request, time.monotonic() + timeout_s, again=True)

    def delete(self, name: str, timeout_s: float = 1800.0) -> bool:
        """Delete a TPU and its place in the queue; returns False if there was none."""
        if self.find(name) is None:
            return False
        self._delete(name, f"deleting TPU {name}", time.monotonic() + timeout_s)
        return True

    def host_keys(self, tpu: Tpu) -> dict[int, list[str]]:
        """The public SSH keys of each host by TPU worker id, as the hosts themselves published them to the API.

        Raises:
            TpuFailed: a host has published none (yet), or the TPU was made without guest attributes.
        """
        keys, doing = {}, f"reading the SSH host keys of TPU {tpu.name}"
        for host in tpu.hosts():
            asked = {"name": self._node_name(tpu.name), "worker_ids": [str(host.worker_id)]}
            answer = call(self._client.get_guest_attributes, doing, self.timing, **asked)
            entries = [entry for found in answer.guest_attributes for entry in found.query_value.items]
            keys[host.worker_id] = [
                f"{entry.key} {entry.value}"
                for entry in entries
                if entry.key.startswith(("ssh-", "ecdsa-")) and entry.value
            ]
        if missing := [worker_id for worker_id, found in keys.items() if not found]:
            raise TpuFailed(
                f"TPU {tpu.name}: workers {missing} published no SSH host key: try again in a minute; if the TPU was not "
                "made by tpu_utils.py, give --known-hosts FILE with lines ADDRESS KEYTYPE KEY (docs/pod.md)",
                Kind.NOT_FOUND,
            )
        return keys

    def _obtain(self, request: Request, deadline: float, *, again: bool) -> Tpu:
        doing = f"making TPU {request.name} ({request.type.name}) in {self.zone}"
        made = False
        looks = self._looks(doing, deadline)
        while True:
            pause_s = next(looks)
            found = self.find(request.name)
            if found is not None and found.phase is not Phase.GOING:
                _require_same(found, request)
            if found is None:
                made = self._try_create(request, doing, deadline, again=again) or made
                continue
            if found.phase is Phase.READY:
                return found
            if found.phase is Phase.STOPPED:
                raise UserError(
                    f"TPU {found.name} is {found.state}: start it with `gcloud compute tpus tpu-vm start {found.name} --zone "
                    f"{self.zone}`, or delete it"
                )
            if found.phase is Phase.LOST:
                self._give_up_or_delete(found, doing, deadline, again=again, made=made)
            else:
                log.info("TPU %s: %s; looking again in %.0f s", found.name, found.state, pause_s)

    def _looks(self, doing: str, deadline: float) -> Iterator[float]:
        """Yields the next pause, and takes it, until the deadline raises."""
        for pause_s in api.pauses(self.timing):
            yield pause_s
            if time.monotonic() >= deadline:
                raise fault(doing, Kind.TIMEOUT, "not done in time")
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))

    def _try_create(self, request: Request, doing: str, deadline: float, *, again: bool) -> bool:
        log.info("%s, %s%s", doing, request.tier, ", in the queue" if request.queued else "")
        fields: dict[str, Any] = {"node_id": request.name, "node": request.node()}
        method = self._client.create_node
        if request.queued:
            queued = request.queued_resource(self.parent)
            fields = {"queued_resource_id": request.name, "queued_resource": queued}
            method = self._client.create_queued_resource
        try:
            with _no_error(Kind.EXISTS):  # an attempt that seemed to fail had reached the service
                self._operate(method, doing, deadline, parent=self.parent, **fields)
        except TpuFailed as error:
            if not again or error.kind not in (Kind.STOCKOUT, Kind.UNAVAILABLE):
                raise
            log.warning("%s", error)
            return False
        return True

    def _give_up_or_delete(self, found: Tpu, doing: str, deadline: float, *, again: bool, made: bool) -> None:
        """A lost TPU goes; but one that we just asked for and that failed for the user's reason would only fail again."""
        if found.why is not None and made and isinstance(found.why, TpuRefused):
            raise found.why
        if not again:
            raise found.why or TpuFailed(
                f"TPU {found.name} is {found.state}: delete it and make it again, or let `create --again` do so",
                Kind.STOCKOUT,
            )
        log.warning("TPU %s is %s: deleting it and making it again", found.name, found.state)
        self._delete(found.name, doing, deadline)

    def _begin_to_delete(self, found: Tpu, doing: str, deadline: float) -> None:
        log.info("deleting TPU %s (%s, %s)", found.name, found.type, found.state)
        with _no_error(Kind.NOT_FOUND):  # gone meanwhile: all the better
            if found.queued_name is None:
                name = self._node_name(found.name)
                self._operate(self._client.delete_node, doing, deadline, name=name)
            else:  # with force, its node goes too
                method, name = self._client.delete_queued_resource, found.queued_name
                self._operate(method, doing, deadline, name=name, force=True)

    def _operate(self, method: Any, doing: str, deadline: float, **request: Any) -> None:
        """Begin a long-running operation and wait for its end."""
        operation = call(method, doing, self.timing, **request)
        for _ in self._looks(doing, deadline):
            with explained(doing):
                if operation.done(retry=api.retries(self.timing)):
                    operation.result(timeout=self.timing.call_s)
                    return
            log.info("%s", doing)

    def _delete(self, name: str, doing: str, deadline: float) -> None:
        """Returns once it is gone. A suspended queued resource that lost its node is deleted a second time."""
        for _ in self._looks(doing, deadline):
            found = self.find(name)
            if found is None:
                return
            if found.phase is not Phase.GOING:
                self._begin_to_delete(found, doing, deadline)

    def _get(self, method: Any, name: str, doing: str) -> Any | None:
        with _no_error(Kind.NOT_FOUND):
            return call(method, doing, self.timing, name=name)
        return None

    def _node_name(self, name: str) -> str:
        return f"{self.parent}/nodes/{name}"


@contextmanager
def _no_error(kind: Kind) -> Iterator[None]:
    """A refusal of this kind inside is none."""
    try:
        yield
    except TpuRefused as error:
        if error.kind is not kind:
            raise


def _require_same(found: Tpu, request: Request) -> None:
    wanted = (request.type.name, request.tier, request.runtime())
    there = (found.type, found.tier, found.runtime_version)
    if wanted != there:
        raise UserError(
            f"TPU {found.name} exists as {', '.join(there)}, and {', '.join(wanted)} is wanted: take another name, or delete "
            "it first"
        )


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]
