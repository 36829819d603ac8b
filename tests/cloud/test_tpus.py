"""TPU VMs and queued resources through Google's own client library, against a server on loopback."""

import logging
import threading
import time

import pytest
from google.rpc import code_pb2
from support.tpu_api import NODE, Refusal, TpuApi
from support.waiting import LONG_S

import tpu_utils
from mesh_transformer import slices
from mesh_transformer.cloud import api as cloud_api
from mesh_transformer.cloud.api import ErrorKind, TpuFailed, TpuRefused
from mesh_transformer.cloud.request import TpuRequest
from mesh_transformer.cloud.state import TpuPhase
from mesh_transformer.cloud.tpus import Tpus
from mesh_transformer.errors import UserError

V3 = slices.parse("v3-32")
PARENT = "projects/test/locations/europe-west4-a"


def request(name: str = "a", **changes: object) -> TpuRequest:
    return TpuRequest(name, V3, **changes)  # type: ignore[arg-type]


def count(api: TpuApi, method: str) -> int:
    return api.calls.count(method)


@pytest.mark.parametrize("queued", [False, True])
def test_round_trip(api: TpuApi, tpus: Tpus, queued: bool) -> None:
    assert tpus.find("a") is None
    made = tpus.create(request(queued=queued, labels={"team": "x"}), timeout_s=LONG_S)
    assert (made.phase, made.type, made.tier) == (TpuPhase.READY, "v3-32", "on-demand")
    assert [host.worker_id for host in made.hosts()] == [0, 1, 2, 3]
    assert made.hosts()[2].address == "127.0.1.3"
    assert made.hosts(external=True)[2].address == "203.0.113.3"
    assert made.labels == {"team": "x"}
    assert tpus.describe("a") == made
    assert tpus.all() == [made]
    assert tpus.delete("a") is True
    assert not api.nodes
    assert not api.queued
    assert tpus.delete("a") is False
    assert tpus.all() == []


def test_all_fields_of_a_request_arrive(api: TpuApi, tpus: Tpus) -> None:
    tpus.create(
        request(
            tier="spot",
            runtime_version="mine",
            network="net",
            subnetwork="sub",
            external_addresses=False,
            service_account="x@test",
            tags=("ssh",),
            ssh_keys=("me:ssh-ed25519 AAAA",),
        ),
        timeout_s=LONG_S,
    )
    node = api.nodes[f"{PARENT}/nodes/a"]
    assert (node.runtime_version, node.accelerator_type) == ("mine", "v3-32")
    assert (node.network_config.network, node.network_config.subnetwork) == ("net", "sub")
    assert not node.network_config.enable_external_ips
    assert node.scheduling_config.spot
    assert not node.scheduling_config.preemptible
    assert node.service_account.email == "x@test"
    assert list(node.tags) == ["ssh"]
    assert node.metadata["ssh-keys"] == "me:ssh-ed25519 AAAA"
    assert tpus.describe("a").external == ("", "", "", "")


def test_reservation_and_limit_in_the_queue(api: TpuApi, tpus: Tpus) -> None:
    wanted = request(tier="reserved", queued=True, reservation=f"{PARENT}/reservations/r", valid_for_s=60)
    assert tpus.create(wanted, timeout_s=LONG_S).tier == "reserved"
    entry = api.queued[f"{PARENT}/queuedResources/a"]
    assert "guaranteed" in entry
    assert entry.reservation_name.endswith("/r")
    assert entry.queueing_policy.valid_until_duration.seconds == 60


def test_a_repeated_create_creates_no_second_tpu(api: TpuApi, tpus: Tpus) -> None:
    tpus.create(request(), timeout_s=LONG_S)
    tpus.create(request(), timeout_s=LONG_S)
    assert count(api, "CreateNode") == 1
    for other in (
        TpuRequest("a", slices.parse("v3-8")),
        request(tier="spot"),
        request(runtime_version="mine"),
    ):
        with pytest.raises(UserError, match="exists as v3-32, on-demand, tpu-ubuntu2204-base"):
            tpus.create(other, timeout_s=LONG_S)


def test_concurrent_creates_share_one_tpu(api: TpuApi, tpus: Tpus) -> None:
    api.delay_s = 0.3
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(tpus.create(request(), timeout_s=LONG_S))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(api.nodes) == 1


def test_transient_errors_are_retried(api: TpuApi, tpus: Tpus) -> None:
    for method in ("GetNode", "CreateNode", "GetOperation", "ListNodes", "DeleteNode"):
        api.fail(method, code_pb2.UNAVAILABLE, times=2)
    tpus.create(request(), timeout_s=LONG_S)
    assert len(tpus.all()) == 1
    assert tpus.delete("a")
    assert count(api, "CreateNode") == 3


def test_unavailable_for_good(api: TpuApi, tpus: Tpus) -> None:
    api.fail("GetNode", code_pb2.UNAVAILABLE, times=10_000)
    began = time.monotonic()
    with pytest.raises(TpuFailed, match="service unavailable") as failure:
        tpus.find("a")
    assert failure.value.kind is ErrorKind.UNAVAILABLE
    assert time.monotonic() - began > 2


def test_a_request_with_a_lost_answer(api: TpuApi, tpus: Tpus) -> None:
    """The second attempt gets ALREADY_EXISTS, and waits for the TPU of the first one."""
    api.fail("CreateNode", code_pb2.UNAVAILABLE, late=True)
    assert tpus.create(request(), timeout_s=LONG_S).phase is TpuPhase.READY
    assert count(api, "CreateNode") == 2


@pytest.mark.parametrize(
    ("code", "reason", "kind", "words"),
    [
        (code_pb2.PERMISSION_DENIED, "IAM_PERMISSION_DENIED", ErrorKind.PERMISSION, "roles/tpu.admin"),
        (code_pb2.PERMISSION_DENIED, "SERVICE_DISABLED", ErrorKind.DISABLED, "gcloud services enable"),
        (code_pb2.UNAUTHENTICATED, "", ErrorKind.CREDENTIALS, "application-default login"),
        (code_pb2.INVALID_ARGUMENT, "", ErrorKind.BAD_REQUEST, "runtimes"),
    ],
)
def test_refusals(api: TpuApi, tpus: Tpus, code: int, reason: str, kind: ErrorKind, words: str) -> None:
    api.fail("CreateNode", code, "the words of the API", reason=reason)
    with pytest.raises(TpuRefused) as refusal:
        tpus.ensure(request(), timeout_s=LONG_S)
    assert refusal.value.kind is kind
    for part in ("creating TPU a (v3-32) in europe-west4-a", "the words of the API", reason, words):
        assert part in str(refusal.value)
    assert count(api, "CreateNode") == 1


def test_quota(api: TpuApi, tpus: Tpus) -> None:
    api.quota = 1
    tpus.create(request("a"), timeout_s=LONG_S)
    with pytest.raises(TpuRefused, match=r"quota: Quota limit .* \[RATE_LIMIT_EXCEEDED\]. Request more") as refusal:
        tpus.ensure(request("b"), timeout_s=LONG_S)
    assert refusal.value.kind is ErrorKind.QUOTA


@pytest.mark.parametrize("words", ["no more capacity in the zone", "does not have enough resources available"])
def test_stockout(api: TpuApi, tpus: Tpus, words: str) -> None:
    """`create` fails at once; `ensure` retries until there is capacity."""
    api.capacity["v3-32"], api.stockout = 0, f"There is {words} z"
    with pytest.raises(TpuFailed, match=f"{words}.*try another zone") as failure:
        tpus.create(request(), timeout_s=LONG_S)
    assert failure.value.kind is ErrorKind.STOCKOUT
    with pytest.raises(TpuFailed, match="timed out: not (ready|done) in time"):
        tpus.ensure(request(), timeout_s=1)
    assert count(api, "CreateNode") > 3
    timer = threading.Timer(0.5, lambda: api.capacity.update({"v3-32": 1}))
    timer.start()
    assert tpus.ensure(request(), timeout_s=LONG_S).phase is TpuPhase.READY


def test_waiting_in_the_queue(api: TpuApi, tpus: Tpus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    api.capacity["v3-32"] = 0
    with pytest.raises(TpuFailed, match="not done in time"):
        tpus.create(request(queued=True), timeout_s=1)
    assert "queue WAITING_FOR_RESOURCES" in caplog.text
    assert tpus.describe("a").phase is TpuPhase.PENDING
    assert [tpu.name for tpu in tpus.all()] == ["a"]
    api.capacity["v3-32"] = 1
    assert tpus.create(request(queued=True), timeout_s=LONG_S).phase is TpuPhase.READY
    assert count(api, "CreateQueuedResource") == 1


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("state", [NODE.PREEMPTED, NODE.TERMINATED, NODE.STOPPED])
def test_a_preempted_tpu_is_created_again(api: TpuApi, tpus: Tpus, queued: bool, state: NODE) -> None:
    wanted = request(tier="spot", queued=queued)
    tpus.ensure(wanted, timeout_s=LONG_S)
    api.preempt("a", state)
    with pytest.raises(TpuFailed, match="delete it and create it again"):
        tpus.create(wanted, timeout_s=LONG_S)
    assert tpus.ensure(wanted, timeout_s=LONG_S).phase is TpuPhase.READY
    assert count(api, "CreateQueuedResource" if queued else "CreateNode") == 2
    assert count(api, "DeleteQueuedResource" if queued else "DeleteNode") == 1


def test_suspended_while_waiting(api: TpuApi, tpus: Tpus) -> None:
    """Two TPUs are preempted right after their creation: `ensure` continues until one is ready."""
    api.preempt_next = 2
    assert tpus.ensure(request(tier="spot", queued=True), timeout_s=LONG_S).phase is TpuPhase.READY
    assert count(api, "CreateQueuedResource") == 3


def test_failed_in_the_queue_because_of_the_user(api: TpuApi, tpus: Tpus) -> None:
    """Each call requests it once: it does not repeat its own failed request, but it replaces that of an earlier
    call."""
    api.queue_error = Refusal(code_pb2.PERMISSION_DENIED, "no access to the network")
    for asked in (1, 2):
        with pytest.raises(TpuRefused, match="no access to the network") as refusal:
            tpus.ensure(request(queued=True), timeout_s=LONG_S)
        assert refusal.value.kind is ErrorKind.PERMISSION
        assert count(api, "CreateQueuedResource") == asked


def test_stopped_by_its_owner(api: TpuApi, tpus: Tpus) -> None:
    tpus.create(request(), timeout_s=LONG_S)
    api.preempt("a", NODE.STOPPED)
    with pytest.raises(UserError, match="gcloud compute tpus tpu-vm start a --zone europe-west4-a"):
        tpus.ensure(request(), timeout_s=LONG_S)


def test_host_keys(api: TpuApi, tpus: Tpus) -> None:
    tpu = tpus.create(request(), timeout_s=LONG_S)
    api.host_keys = {f"127.0.1.{i}": f"ssh-ed25519 KEY{i}" for i in (1, 2, 3)}
    with pytest.raises(TpuFailed, match=r"workers \[3\] published no SSH host key"):
        tpus.host_keys(tpu)
    api.host_keys["127.0.1.4"] = "ecdsa-sha2-nistp256 KEY4"
    assert tpus.host_keys(tpu) == {
        0: ["ssh-ed25519 KEY1"], 1: ["ssh-ed25519 KEY2"], 2: ["ssh-ed25519 KEY3"], 3: ["ecdsa-sha2-nistp256 KEY4"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "A"}, "is no valid name of a TPU"),
        ({"name": "a-"}, "is no valid name of a TPU"),
        ({"labels": {"Team": "x"}}, "label Team=x"),
        ({"valid_for_s": 5}, "--queued"),
        ({"reservation": "r", "queued": True}, "--reserved"),
        ({"tier": "preemptible", "queued": True}, "--spot"),
        ({"type": slices.parse("v7x-8")}, "Kubernetes"),
    ],
)
def test_bad_requests(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TpuRequest(**{"name": "a", "type": V3, **changes})


@pytest.mark.parametrize("address", ["192.0.2.1:80", "tpu.googleapis.com:443", "127.0.0.1", "127.0.0.1:x"])
def test_plain_text_to_this_machine_only(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cloud_api.ADDRESS_VARIABLE, address)
    with pytest.raises(UserError, match="an address of this machine"):
        cloud_api.connect()


def test_project_and_zone(monkeypatch: pytest.MonkeyPatch, api: TpuApi) -> None:
    assert Tpus("europe-west4-a", project="other").parent == "projects/other/locations/europe-west4-a"
    monkeypatch.delenv("GOOGLE_CLOUD_PROJECT")
    with pytest.raises(UserError, match="give --project"):
        Tpus("europe-west4-a")
    with pytest.raises(UserError, match="is no zone"):
        Tpus("europe-west4", project="p")


def test_functions_of_2021(api: TpuApi) -> None:
    assert tpu_utils.create_tpu("pod", "europe-west4-a", "v3-32", True) is True
    assert tpu_utils.check_tpu("pod", "europe-west4-a") == {"name": "pod", "acceleratorType": "v3-32", "state": "READY"}
    assert tpu_utils.delete_tpu("pod", "europe-west4-a") is True
    assert not api.nodes
