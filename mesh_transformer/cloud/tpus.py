"""TPU VMs and queued resources of one project and zone: create, find, list, wait, delete. All operations may be
repeated."""

import enum
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud import api
from mesh_transformer.cloud.api import (
    ErrorKind,
    Timing,
    TpuError,
    TpuFailed,
    TpuRefused,
    call,
    tpu_error,
    translated_errors,
)
from mesh_transformer.cloud.hosts import Host
from mesh_transformer.cloud.request import TpuRequest
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)
DAY_S = 24 * 3600.0


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
    return api.from_status(f"TPU {name} in the queue", error.code, error.message or "failed without a reason")


class Tpus:
    """The TPUs of a project in a zone.

    Args:
        zone: such as europe-west4-a.
        project: None: the project of the environment (`project_of`).
        client: a `TpuClient`; None: a new one (`connect`).
        timing: of calls and polls.

    Raises:
        UserError: the zone is invalid, no project is set, or there are no credentials.
    """

    def __init__(self, zone: str, project: str | None = None, client: Any | None = None, timing: Timing | None = None):
        if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]+-[a-z]", zone):
            raise UserError(f"{zone!r} is no zone: give a zone such as europe-west4-a")
        self.zone = zone
        self.project = api.project_of(project)
        self.timing = timing or Timing()
        self.parent = f"projects/{self.project}/locations/{zone}"
        self._client = client or api.connect()

    def find(self, name: str) -> Tpu | None:
        """The TPU of that name, queued or created; None if there is none."""
        doing = f"looking for TPU {name}"
        node = self._get(self._client.get_node, self._node_name(name), doing)
        queued_name = (node and node.queued_resource) or f"{self.parent}/queuedResources/{name}"
        queued = self._get(self._client.get_queued_resource, queued_name, doing)
        return None if node is None and queued is None else tpu_of(name, node, queued)

    def describe(self, name: str) -> Tpu:
        """The TPU of that name.

        Raises:
            TpuRefused: there is none.
        """
        found = self.find(name)
        if found is None:
            raise tpu_error(f"TPU {name}", ErrorKind.NOT_FOUND, f"there is none in {self.zone} of {self.project}")
        return found

    def all(self) -> list[Tpu]:
        """All TPUs, created or queued, sorted by name."""
        doing = f"listing the TPUs of {self.zone}"
        client = self._client
        # further pages of the lists can fail too
        with translated_errors(doing):
            created, entries = (
                list(call(method, doing, self.timing, parent=self.parent))
                for method in (client.list_nodes, client.list_queued_resources)
            )
        nodes = {_short_name(node.name): node for node in created}
        queued = {
            spec.node_id or _short_name(entry.name): entry for entry in entries for spec in entry.tpu.node_spec[:1]
        }
        return [tpu_of(name, nodes.get(name), queued.get(name)) for name in sorted(nodes | queued)]

    def create(self, request: TpuRequest, timeout_s: float = DAY_S) -> Tpu:
        """Create a TPU, or wait for one of that name that is being created. Returns when it is ready.

        Raises:
            UserError: a TPU of that name has another type, tier or runtime version.
            TpuRefused, TpuFailed: the API reported an error, or the TPU was not ready in time.
        """
        return self._obtain(request, time.monotonic() + timeout_s, recreate=False)

    def ensure(self, request: TpuRequest, timeout_s: float = DAY_S) -> Tpu:
        """Like `create`, but a TPU that was preempted, suspended or failed is deleted and created again.

        Without capacity it retries, with growing pauses, until `timeout_s`.
        """
        return self._obtain(request, time.monotonic() + timeout_s, recreate=True)

    def delete(self, name: str, timeout_s: float = 1800.0) -> bool:
        """Delete a TPU and its queued resource. Returns False if there was none."""
        if self.find(name) is None:
            return False
        self._delete(name, f"deleting TPU {name}", time.monotonic() + timeout_s)
        return True

    def host_keys(self, tpu: Tpu) -> dict[int, list[str]]:
        """The public SSH keys of each host by TPU worker ID, which the hosts publish in their guest attributes.

        Raises:
            TpuFailed: a host has not published its keys, or the TPU was created without guest attributes.
        """
        keys, doing = {}, f"reading the SSH host keys of TPU {tpu.name}"
        for host in tpu.hosts():
            fields = {"name": self._node_name(tpu.name), "worker_ids": [str(host.worker_id)]}
            answer = call(self._client.get_guest_attributes, doing, self.timing, **fields)
            entries = [entry for found in answer.guest_attributes for entry in found.query_value.items]
            keys[host.worker_id] = [
                f"{entry.key} {entry.value}"
                for entry in entries
                if entry.key.startswith(("ssh-", "ecdsa-")) and entry.value
            ]
        if missing := [worker_id for worker_id, found in keys.items() if not found]:
            raise TpuFailed(
                f"TPU {tpu.name}: workers {missing} published no SSH host key: try again in a minute; if tpu_utils.py did not "
                "create the TPU, give --known-hosts FILE with lines ADDRESS KEYTYPE KEY (docs/pod.md)",
                ErrorKind.NOT_FOUND,
            )
        return keys

    def _obtain(self, request: TpuRequest, deadline: float, *, recreate: bool) -> Tpu:
        doing = f"creating TPU {request.name} ({request.type.name}) in {self.zone}"
        created = False
        polls = self._polls(doing, deadline)
        while True:
            pause_s = next(polls)
            found = self.find(request.name)
            if found is not None and found.phase is not TpuPhase.DELETING:
                _require_same(found, request)
            if found is None:
                created = self._try_create(request, doing, deadline, recreate=recreate) or created
                continue
            if found.phase is TpuPhase.READY:
                return found
            if found.phase is TpuPhase.STOPPED:
                raise UserError(
                    f"TPU {found.name} is {found.state}: start it with `gcloud compute tpus tpu-vm start {found.name} --zone "
                    f"{self.zone}`, or delete it"
                )
            if found.phase is TpuPhase.LOST:
                self._give_up_or_delete(found, doing, deadline, recreate=recreate, created=created)
            else:
                log.info("TPU %s: %s; next check in %.0f s", found.name, found.state, pause_s)

    def _polls(self, doing: str, deadline: float) -> Iterator[float]:
        """Yields the seconds until the next poll, then sleeps. After the deadline it raises an error."""
        for pause_s in api.pauses(self.timing):
            yield pause_s
            if time.monotonic() >= deadline:
                raise tpu_error(doing, ErrorKind.TIMEOUT, "not done in time")
            time.sleep(min(pause_s, max(0.0, deadline - time.monotonic())))

    def _try_create(self, request: TpuRequest, doing: str, deadline: float, *, recreate: bool) -> bool:
        log.info("%s, %s%s", doing, request.tier, ", in the queue" if request.queued else "")
        fields: dict[str, Any] = {"node_id": request.name, "node": request.node()}
        method = self._client.create_node
        if request.queued:
            queued = request.queued_resource(self.parent)
            fields = {"queued_resource_id": request.name, "queued_resource": queued}
            method = self._client.create_queued_resource
        try:
            # an earlier attempt may have reached the service although it seemed to fail
            with _ignoring(ErrorKind.EXISTS):
                self._run_operation(method, doing, deadline, parent=self.parent, **fields)
        except TpuFailed as error:
            if not recreate or error.kind not in (ErrorKind.STOCKOUT, ErrorKind.UNAVAILABLE):
                raise
            log.warning("%s", error)
            return False
        return True

    def _give_up_or_delete(self, found: Tpu, doing: str, deadline: float, *, recreate: bool, created: bool) -> None:
        """Delete a lost TPU. Raise the error of a TPU that this call created and that the user must correct: it would
        fail again."""
        if found.error is not None and created and isinstance(found.error, TpuRefused):
            raise found.error
        if not recreate:
            raise found.error or TpuFailed(
                f"TPU {found.name} is {found.state}: delete it and create it again, or use `create --again`",
                ErrorKind.STOCKOUT,
            )
        log.warning("TPU %s is %s: deleting it and creating it again", found.name, found.state)
        self._delete(found.name, doing, deadline)

    def _start_deletion(self, found: Tpu, doing: str, deadline: float) -> None:
        log.info("deleting TPU %s (%s, %s)", found.name, found.type, found.state)
        # it may be deleted meanwhile
        with _ignoring(ErrorKind.NOT_FOUND):
            if found.queued_name is None:
                name = self._node_name(found.name)
                self._run_operation(self._client.delete_node, doing, deadline, name=name)
            else:
                # `force` deletes its node too
                method, name = self._client.delete_queued_resource, found.queued_name
                self._run_operation(method, doing, deadline, name=name, force=True)

    def _run_operation(self, method: Any, doing: str, deadline: float, **request: Any) -> None:
        """Start a long-running operation and wait for its end."""
        operation = call(method, doing, self.timing, **request)
        for _ in self._polls(doing, deadline):
            with translated_errors(doing):
                if operation.done(retry=api.retries(self.timing)):
                    operation.result(timeout=self.timing.call_s)
                    return
            log.info("%s", doing)

    def _delete(self, name: str, doing: str, deadline: float) -> None:
        """Return when the TPU is deleted. A suspended queued resource without a node needs a second deletion."""
        for _ in self._polls(doing, deadline):
            found = self.find(name)
            if found is None:
                return
            if found.phase is not TpuPhase.DELETING:
                self._start_deletion(found, doing, deadline)

    def _get(self, method: Any, name: str, doing: str) -> Any | None:
        with _ignoring(ErrorKind.NOT_FOUND):
            return call(method, doing, self.timing, name=name)
        return None

    def _node_name(self, name: str) -> str:
        return f"{self.parent}/nodes/{name}"


@contextmanager
def _ignoring(kind: ErrorKind) -> Iterator[None]:
    """Ignores errors of this kind."""
    try:
        yield
    except TpuRefused as error:
        if error.kind is not kind:
            raise


def _require_same(found: Tpu, request: TpuRequest) -> None:
    wanted = (request.type.name, request.tier, request.runtime())
    there = (found.type, found.tier, found.runtime_version)
    if wanted != there:
        raise UserError(
            f"TPU {found.name} exists as {', '.join(there)}, not as {', '.join(wanted)}: use another name, or delete it first"
        )


def _short_name(name: str) -> str:
    return name.rsplit("/", 1)[-1]
