"""A loopback server that speaks the Cloud TPU API (google.cloud.tpu.v2) over plain gRPC. For tests only.

It implements nodes and queued resources with their states, long-running operations, ALREADY_EXISTS and NOT_FOUND, quota
errors with details, stockouts as failed operations with a message only, guest attributes, and queued resources that are
suspended when they lose their node; also queued resources of several nodes. It does not implement authentication, pages
of lists, and updates.

    with TpuApi() as api:
        api.environment()                          # variables that select this server in tpu_utils.py and train.py
        api.fail("CreateNode", UNAVAILABLE)        # the next such call fails
        api.capacity["v3-32"] = 0                  # a stockout, until it is raised
        api.preempt("a")                           # as the cloud preempts it
        api.preempt("a-1")                         # one of several nodes of a queued resource
        api.preempt_next = 2                       # preempts the next two queued resources while their nodes are
        created
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.cloud.tpu_v2.types import cloud_tpu
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from mesh_transformer import slices
from mesh_transformer.errors import UserError

NODE = cloud_tpu.Node.State
QUEUED = cloud_tpu.QueuedResourceState.State
OPERATION_CALLS = ("GetOperation",)
CALLS = (
    "CreateNode", "GetNode", "ListNodes", "DeleteNode", "CreateQueuedResource", "GetQueuedResource",
    "ListQueuedResources",
    "DeleteQueuedResource", "GetGuestAttributes",
)  # fmt: skip


@dataclass
class Failure:
    """The answer to the next `times` calls of a method."""

    method: str
    code: int
    message: str
    reason: str
    times: int
    late: bool


class Refusal(Exception):
    """An error that ends an operation or a call."""

    def __init__(self, code: int, message: str, *details: Any):
        self.status = status_pb2.Status(code=code, message=message)
        for detail in details:
            self.status.details.add().Pack(detail)


class TpuApi:
    """The server.

    Args:
        addresses: addresses of the hosts of every TPU, by slice, then by TPU worker ID; loopback addresses if there
            are too few.
        host_keys: the keys that each host publishes in its guest attributes: lines "ssh-ed25519 AAAA...", by address.
        delay_s: time of each transition.
        quota: limit for the number of nodes.
    """

    def __init__(
        self,
        addresses: tuple[str, ...] = (),
        host_keys: dict[str, str] | None = None,
        delay_s: float = 0.05,
        quota: int = 100,
        listen: str = "127.0.0.1",
    ):
        self.addresses, self.host_keys, self.delay_s, self.quota = addresses, host_keys or {}, delay_s, quota
        self.capacity: dict[str, int] = {}
        self.stockout = (
            "There is no more capacity in the zone; you can try in another zone where Cloud TPU Nodes are offered"
        )
        self.preempt_next = 0
        # queued resources get the state FAILED with this error
        self.queue_error: Refusal | None = None
        self.nodes: dict[str, cloud_tpu.Node] = {}
        self.queued: dict[str, cloud_tpu.QueuedResource] = {}
        self.calls: list[str] = []
        self._operations: dict[str, operations_pb2.Operation] = {}
        self._failures: list[Failure] = []
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        tpu = {name: self._handler(name, getattr(cloud_tpu, f"{name}Request")) for name in CALLS}
        operations = {"GetOperation": self._operation_handler()}
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler("google.cloud.tpu.v2.Tpu", tpu),
                grpc.method_handlers_generic_handler("google.longrunning.Operations", operations),
            )
        )
        self.address = f"{listen}:{self._server.add_insecure_port(f'{listen}:0')}"

    def __enter__(self) -> TpuApi:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None)

    def environment(self) -> dict[str, str]:
        """Variables that select this server in the project's commands, and disable the metadata server in Google's
        libraries."""
        return {
            "MTJ_TPU_API": self.address,
            "GOOGLE_CLOUD_PROJECT": "test",
            "NO_GCE_CHECK": "true",
            "GCE_METADATA_HOST": "127.0.0.1:9",
        }

    def fail(
        self,
        method: str,
        code: int,
        message: str = "an error of the test",
        *,
        reason: str = "",
        times: int = 1,
        late: bool = False,
    ) -> None:
        """Answer the next calls of a method with an error; if `late`, execute them first."""
        with self._lock:
            self._failures.append(Failure(method, code, message, reason, times, late))

    def preempt(self, name: str, state: NODE = NODE.PREEMPTED) -> None:
        """Preempt a TPU. The queued resource of a queued TPU is suspended and loses its node."""
        with self._lock:
            for full, entry in self.queued.items():
                if full.endswith(f"/{name}"):
                    self._set_queued(entry, QUEUED.SUSPENDING)
                    self._later(lambda entry=entry: self._suspend(entry))
                    return
            self._node(name).state = state

    def _suspend(self, entry: cloud_tpu.QueuedResource) -> None:
        names = self._node_names(entry)
        self.nodes = {full: node for full, node in self.nodes.items() if full.rsplit("/", 1)[1] not in names}
        self._set_queued(entry, QUEUED.SUSPENDED)

    @staticmethod
    def _node_names(entry: cloud_tpu.QueuedResource) -> list[str]:
        spec = entry.tpu.node_spec[0]
        several = spec.multislice_params
        prefix = several.node_id_prefix or entry.name.rsplit("/", 1)[1]
        return [spec.node_id] if spec.node_id else [f"{prefix}-{i}" for i in range(several.node_count)]

    def _node(self, name: str) -> cloud_tpu.Node:
        return next(node for full, node in self.nodes.items() if full.endswith(f"/{name}"))

    # The calls. Each gets a request and returns a response, or raises Refusal. The lock is held.

    def GetNode(self, request: Any) -> Any:
        return self._find(self.nodes, request.name)

    def ListNodes(self, request: Any) -> Any:
        return cloud_tpu.ListNodesResponse(nodes=self._under(self.nodes, request.parent))

    def CreateNode(self, request: Any) -> Any:
        node = self._admit(request.parent, request.node_id, request.node)
        return self._operation(request.parent, lambda: self._bring_up(node))

    def DeleteNode(self, request: Any) -> Any:
        node = self._find(self.nodes, request.name)
        if node.queued_resource:
            raise Refusal(code_pb2.FAILED_PRECONDITION, "The node belongs to a queued resource: delete that")
        node.state = NODE.DELETING

        def gone() -> Any:
            self.nodes.pop(request.name, None)
            return empty_pb2.Empty()

        return self._operation(request.name.rsplit("/nodes", 1)[0], gone)

    def GetGuestAttributes(self, request: Any) -> Any:
        node = self._find(self.nodes, request.name)
        if node.metadata.get("enable-guest-attributes", "").upper() != "TRUE":
            return cloud_tpu.GetGuestAttributesResponse()
        answers = []
        for worker_id in request.worker_ids or range(len(node.network_endpoints)):
            key = self.host_keys.get(node.network_endpoints[int(worker_id)].ip_address, "")
            items = [{"namespace": "guestInventory", "key": "ShortName", "value": "debian"}]
            if key:
                kind, value = key.split()[:2]
                items.append({"namespace": "hostkeys", "key": kind, "value": value})
            answers.append(cloud_tpu.GuestAttributes(query_path="", query_value={"items": items}))
        return cloud_tpu.GetGuestAttributesResponse(guest_attributes=answers)

    def GetQueuedResource(self, request: Any) -> Any:
        return self._find(self.queued, request.name)

    def ListQueuedResources(self, request: Any) -> Any:
        found = self._under(self.queued, request.parent)
        return cloud_tpu.ListQueuedResourcesResponse(queued_resources=found)

    def CreateQueuedResource(self, request: Any) -> Any:
        entry = cloud_tpu.QueuedResource(request.queued_resource)
        entry.name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        if entry.name in self.queued:
            raise Refusal(code_pb2.ALREADY_EXISTS, f"Resource '{entry.name}' already exists")
        for spec in entry.tpu.node_spec:
            self._check_type(spec.node)
            if "multislice_params" in spec and spec.multislice_params.node_count < 2:
                raise Refusal(code_pb2.INVALID_ARGUMENT, "node_count must be greater than 1")
        self.queued[entry.name] = entry
        self._set_queued(entry, QUEUED.ACCEPTED)
        self._later(lambda: self._queue(entry))
        return self._operation(request.parent, lambda: entry)

    def DeleteQueuedResource(self, request: Any) -> Any:
        entry = self._find(self.queued, request.name)
        if entry.state.state == QUEUED.ACTIVE and not request.force:
            raise Refusal(code_pb2.FAILED_PRECONDITION, "The queued resource has nodes: use force")
        self._set_queued(entry, QUEUED.DELETING)

        def gone() -> Any:
            self.queued.pop(request.name, None)
            for name in self._node_names(entry):
                self.nodes.pop(f"{entry.tpu.node_spec[0].parent}/nodes/{name}", None)
            return empty_pb2.Empty()

        return self._operation(request.name.rsplit("/queuedResources", 1)[0], gone)

    # The state machines.

    def _queue(self, entry: cloud_tpu.QueuedResource) -> None:
        spec = entry.tpu.node_spec[0]
        if entry.state.state not in (QUEUED.ACCEPTED, QUEUED.WAITING_FOR_RESOURCES):
            return
        if self.queue_error is not None:
            entry.state = cloud_tpu.QueuedResourceState(
                state=QUEUED.FAILED, failed_data={"error": self.queue_error.status}
            )
        elif self.capacity.get(spec.node.accelerator_type, 1) <= 0:
            self._set_queued(entry, QUEUED.WAITING_FOR_RESOURCES)
            self._later(lambda: self._queue(entry))
        else:
            self._set_queued(entry, QUEUED.PROVISIONING)
            names = self._node_names(entry)
            nodes = [self._admit(spec.parent, name, spec.node) for name in names]
            for node in nodes:
                node.queued_resource, node.multislice_node = entry.name, len(nodes) > 1
                node.scheduling_config = {"spot": "spot" in entry}
            if self.preempt_next:
                self.preempt_next -= 1
                self.preempt(entry.name.rsplit("/", 1)[1])
            else:
                self._later(lambda: self._activate(entry, nodes))

    def _activate(self, entry: cloud_tpu.QueuedResource, nodes: list[cloud_tpu.Node]) -> None:
        # Timers can fire out of order: a resource that was suspended or deleted meanwhile must stay so.
        if entry.state.state == QUEUED.PROVISIONING:
            for slice_id, node in enumerate(nodes):
                self._bring_up(node, slice_id)
            self._set_queued(entry, QUEUED.ACTIVE)

    def _admit(self, parent: str, name: str, wanted: Any) -> cloud_tpu.Node:
        full = f"{parent}/nodes/{name}"
        if full in self.nodes:
            raise Refusal(code_pb2.ALREADY_EXISTS, f"Resource '{full}' already exists")
        self._check_type(wanted)
        if len(self.nodes) >= self.quota:
            raise Refusal(
                code_pb2.RESOURCE_EXHAUSTED,
                f"Quota limit 'TPUsPerProjectPerZoneForTPUAPI' has been exceeded. Limit: {self.quota} in zone x.",
                error_details_pb2.ErrorInfo(reason="RATE_LIMIT_EXCEEDED", domain="googleapis.com"),
                error_details_pb2.QuotaFailure(
                    violations=[error_details_pb2.QuotaFailure.Violation(subject=parent, description="TPUs")]
                ),
            )
        node = cloud_tpu.Node(wanted)
        node.name, node.state = full, NODE.CREATING
        self.nodes[full] = node
        return node

    def _check_type(self, node: Any) -> None:
        try:
            slices.parse(node.accelerator_type)
        except UserError as error:
            raise Refusal(code_pb2.INVALID_ARGUMENT, f"Unknown accelerator type {node.accelerator_type}") from error

    def _bring_up(self, node: cloud_tpu.Node, slice_id: int = 0) -> cloud_tpu.Node:
        if self.capacity.get(node.accelerator_type, 1) <= 0:
            del self.nodes[node.name]
            raise Refusal(
                code_pb2.RESOURCE_EXHAUSTED,
                self.stockout,
            )
        node.state, node.health = NODE.READY, cloud_tpu.Node.Health.HEALTHY
        count = slices.parse(node.accelerator_type).hosts
        for index in range(slice_id * count, (slice_id + 1) * count):
            address = self.addresses[index] if index < len(self.addresses) else f"127.0.1.{index + 1}"
            endpoint = cloud_tpu.NetworkEndpoint(ip_address=address, port=8470)
            if node.network_config.enable_external_ips:
                endpoint.access_config = {"external_ip": f"203.0.113.{index + 1}"}
            node.network_endpoints.append(endpoint)
        return node

    # Plumbing.

    def _later(self, work: Callable[[], Any]) -> None:
        def locked() -> None:
            with self._lock:
                work()

        timer = threading.Timer(self.delay_s, locked)
        timer.daemon = True
        timer.start()

    def _operation(self, parent: str, work: Callable[[], Any]) -> operations_pb2.Operation:
        operation = operations_pb2.Operation(name=f"{parent}/operations/operation-{next(self._numbers)}")
        self._operations[operation.name] = operation

        def end() -> None:
            try:
                answer = any_pb2.Any()
                answer.Pack(_message(work()))
                operation.response.CopyFrom(answer)
            except Refusal as refusal:
                operation.error.CopyFrom(refusal.status)
            operation.done = True

        self._later(end)
        return operation

    def _handler(self, name: str, request_type: Any) -> Any:
        def answer(request: Any, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                self.calls.append(name)
                try:
                    self._fail_if_requested(name, late=False)
                    made = _message(getattr(self, name)(request)).SerializeToString()
                    self._fail_if_requested(name, late=True)
                    return made
                except Refusal as refusal:
                    _abort(context, refusal)

        return grpc.unary_unary_rpc_method_handler(answer, request_type.deserialize, lambda answer: answer)

    def _operation_handler(self) -> Any:
        def answer(request: Any, context: grpc.ServicerContext) -> bytes:
            with self._lock:
                self.calls.append("GetOperation")
                try:
                    self._fail_if_requested("GetOperation", late=False)
                    return self._find(self._operations, request.name).SerializeToString()
                except Refusal as refusal:
                    _abort(context, refusal)

        from_string = operations_pb2.GetOperationRequest.FromString
        return grpc.unary_unary_rpc_method_handler(answer, from_string, lambda answer: answer)

    def _fail_if_requested(self, method: str, *, late: bool) -> None:
        for failure in self._failures:
            if failure.method == method and failure.late == late and failure.times:
                failure.times -= 1
                info = error_details_pb2.ErrorInfo(reason=failure.reason, domain="googleapis.com")
                raise Refusal(failure.code, failure.message, *([info] if failure.reason else []))

    @staticmethod
    def _find(resources: dict[str, Any], name: str) -> Any:
        if name not in resources:
            raise Refusal(code_pb2.NOT_FOUND, f"Resource '{name}' was not found")
        return resources[name]

    @staticmethod
    def _under(resources: dict[str, Any], parent: str) -> list[Any]:
        return [resource for name, resource in resources.items() if name.startswith(f"{parent}/")]

    @staticmethod
    def _set_queued(entry: cloud_tpu.QueuedResource, state: QUEUED) -> None:
        entry.state = cloud_tpu.QueuedResourceState(state=state)


def _message(value: Any) -> Any:
    return value._pb if hasattr(value, "_pb") else value


def _abort(context: grpc.ServicerContext, refusal: Refusal) -> NoReturn:
    context.abort_with_status(rpc_status.to_status(refusal.status))
    raise AssertionError("abort raises")
