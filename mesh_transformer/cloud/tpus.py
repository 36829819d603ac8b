"""TPU VMs and queued resources of one project and zone: create, find, list, wait, delete. All operations may be
repeated."""

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mesh_transformer.cloud import api
from mesh_transformer.cloud.api import (
    ErrorKind,
    Timing,
    TpuFailed,
    TpuRefused,
    call,
    tpu_error,
    translated_errors,
)
from mesh_transformer.cloud.request import TpuRequest
from mesh_transformer.cloud.state import Tpu, TpuPhase, slice_names, tpu_of
from mesh_transformer.environment import command
from mesh_transformer.errors import UserError

log = logging.getLogger(__name__)
DAY_S = 24 * 3600.0


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
        """The TPU of that name, queued or created; None if there is none.

        Raises:
            UserError: this is the name of one slice among several.
        """
        doing = f"looking for TPU {name}"
        node = self._get(self._client.get_node, self._node_name(name), doing)
        queued_name = (node and node.queued_resource) or f"{self.parent}/queuedResources/{name}"
        queued = self._get(self._client.get_queued_resource, queued_name, doing)
        if node is None and queued is None:
            return None
        names = slice_names(queued) if queued is not None else ()
        if name in names:
            tpu_name = _short_name(queued_name)
            raise UserError(f"{name} is one of the {len(names)} slices of TPU {tpu_name}: give the name {tpu_name}")
        if not names:
            return tpu_of(name, [node], queued)
        # one call for any number of slices
        nodes = self._listed(self._client.list_nodes, doing)
        return tpu_of(name, [nodes.get(slice_name) for slice_name in names], queued)

    def describe(self, name: str) -> Tpu:
        """The TPU of that name.

        Raises:
            TpuRefused: there is none.
        """
        tpu = self.find(name)
        if tpu is None:
            raise tpu_error(f"TPU {name}", ErrorKind.NOT_FOUND, f"there is none in {self.zone} of {self.project}")
        return tpu

    def all(self) -> list[Tpu]:
        """All TPUs, created or queued, sorted by name."""
        doing = f"listing the TPUs of {self.zone}"
        nodes = self._listed(self._client.list_nodes, doing)
        entries = self._listed(self._client.list_queued_resources, doing)
        tpus = []
        for own_name, entry in entries.items():
            several = slice_names(entry)
            name = own_name if several else entry.tpu.node_spec[0].node_id or own_name
            tpus.append(tpu_of(name, [nodes.pop(node_name, None) for node_name in several or (name,)], entry))
        tpus += [tpu_of(name, [node], None) for name, node in nodes.items()]
        return sorted(tpus, key=lambda tpu: tpu.name)

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
        """Delete a TPU, all its slices and its queued resource. Returns False if there was none."""
        if self.find(name) is None:
            return False
        self._delete(name, f"deleting TPU {name}", time.monotonic() + timeout_s)
        return True

    def host_keys(self, tpu: Tpu) -> dict[int, list[str]]:
        """The public SSH keys of each host by `Host.worker_id`, which the hosts publish in their guest attributes.

        Raises:
            TpuFailed: a host has not published its keys, or the TPU was created without guest attributes.
        """
        keys, doing = {}, f"reading the SSH host keys of TPU {tpu.name}"
        # the API counts workers within a slice
        workers = [(tpu_slice, str(index)) for tpu_slice in tpu.slices for index in range(len(tpu_slice.internal))]
        for worker_id, (tpu_slice, index) in enumerate(workers):
            fields = {"name": self._node_name(tpu_slice.name), "worker_ids": [index]}
            answer = call(self._client.get_guest_attributes, doing, self.timing, **fields)
            entries = [entry for attributes in answer.guest_attributes for entry in attributes.query_value.items]
            keys[worker_id] = [
                f"{entry.key} {entry.value}"
                for entry in entries
                if entry.key.startswith(("ssh-", "ecdsa-")) and entry.value
            ]
        if missing := [worker_id for worker_id, lines in keys.items() if not lines]:
            raise TpuFailed(
                f"TPU {tpu.name}: workers {missing} published no SSH host key: try again in a minute; if "
                f"{command('tpu')} did not create the TPU, give --known-hosts FILE with lines ADDRESS KEYTYPE KEY "
                "(docs/pod.md)",
                ErrorKind.NOT_FOUND,
            )
        return keys

    def _obtain(self, request: TpuRequest, deadline: float, *, recreate: bool) -> Tpu:
        doing = f"creating TPU {request.name} ({request.size}) in {self.zone}"
        created = False
        polls = self._polls(doing, deadline)
        while True:
            pause_s = next(polls)
            tpu = self.find(request.name)
            if tpu is not None and tpu.phase is not TpuPhase.DELETING:
                _require_same(tpu, request)
            if tpu is None:
                created = self._try_create(request, doing, deadline, recreate=recreate) or created
                continue
            if tpu.phase is TpuPhase.READY:
                return tpu
            if tpu.phase is TpuPhase.STOPPED:
                stopped = next(tpu_slice.name for tpu_slice in tpu.slices if tpu_slice.phase is TpuPhase.STOPPED)
                raise UserError(
                    f"TPU {tpu.name} is {tpu.state}: start it with `gcloud compute tpus tpu-vm start {stopped} --zone "
                    f"{self.zone}`, or delete it"
                )
            if tpu.phase is TpuPhase.LOST:
                self._give_up_or_delete(tpu, doing, deadline, recreate=recreate, created=created)
            else:
                log.info("TPU %s: %s; next check in %.0f s", tpu.name, tpu.state, pause_s)

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

    def _give_up_or_delete(self, tpu: Tpu, doing: str, deadline: float, *, recreate: bool, created: bool) -> None:
        """Delete a lost TPU. Raise the error of a TPU that this call created and that the user must correct: it would
        fail again."""
        if tpu.error is not None and created and isinstance(tpu.error, TpuRefused):
            raise tpu.error
        if not recreate:
            raise tpu.error or TpuFailed(
                f"TPU {tpu.name} is {tpu.state}: delete it and create it again, or use `create --again`",
                ErrorKind.STOCKOUT,
            )
        log.warning("TPU %s is %s: deleting it and creating it again", tpu.name, tpu.state)
        self._delete(tpu.name, doing, deadline)

    def _start_deletion(self, tpu: Tpu, doing: str, deadline: float) -> None:
        log.info("deleting TPU %s (%s, %s)", tpu.name, tpu.size, tpu.state)
        # it may be deleted meanwhile
        with _ignoring(ErrorKind.NOT_FOUND):
            if tpu.queued_name is None:
                name = self._node_name(tpu.name)
                self._run_operation(self._client.delete_node, doing, deadline, name=name)
            else:
                # `force` deletes its nodes too
                method, name = self._client.delete_queued_resource, tpu.queued_name
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
            tpu = self.find(name)
            if tpu is None:
                return
            if tpu.phase is not TpuPhase.DELETING:
                self._start_deletion(tpu, doing, deadline)

    def _get(self, method: Any, name: str, doing: str) -> Any | None:
        with _ignoring(ErrorKind.NOT_FOUND):
            return call(method, doing, self.timing, name=name)
        return None

    def _listed(self, method: Any, doing: str) -> dict[str, Any]:
        """All nodes or queued resources by name."""
        # further pages of the list can fail too
        with translated_errors(doing):
            return {_short_name(entry.name): entry for entry in call(method, doing, self.timing, parent=self.parent)}

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


def _require_same(tpu: Tpu, request: TpuRequest) -> None:
    requested = (request.size, request.tier, request.runtime())
    existing = (tpu.size, tpu.tier, tpu.runtime_version)
    if requested != existing:
        raise UserError(
            f"TPU {tpu.name} exists as {', '.join(existing)}, not as {', '.join(requested)}: use another name, or "
            "delete it first"
        )


def _short_name(name: str) -> str:
    return name.rsplit("/", 1)[-1]
