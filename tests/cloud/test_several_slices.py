"""A TPU of several slices: the nodes of one queued resource, through Google's own client library."""

import pytest
from support.tpu_api import NODE, TpuApi
from support.waiting import LONG_S

from mesh_transformer import slices
from mesh_transformer.cloud.api import TpuFailed
from mesh_transformer.cloud.hosts import Access
from mesh_transformer.cloud.launch import pod_of
from mesh_transformer.cloud.request import TpuRequest
from mesh_transformer.cloud.state import TpuPhase
from mesh_transformer.cloud.tpus import Tpus
from mesh_transformer.errors import RunError, UserError

# two hosts
V4 = slices.parse("v4-16")
PARENT = "projects/test/locations/europe-west4-a"


def request(count: int = 2, **changes: object) -> TpuRequest:
    return TpuRequest("a", V4, **{"tier": "spot", "queued": True, "slices": count, **changes})  # type: ignore[arg-type]


def test_one_queued_resource(api: TpuApi, tpus: Tpus) -> None:
    """From the request to the deletion. Hosts are sorted by slice, then by worker."""
    made = tpus.create(request(), timeout_s=LONG_S)
    (entry,) = api.queued.values()
    (spec,) = entry.tpu.node_spec
    assert entry.name == f"{PARENT}/queuedResources/a"
    assert (spec.multislice_params.node_count, spec.multislice_params.node_id_prefix) == (2, "a")
    assert not spec.node_id
    assert "spot" in entry
    assert spec.node.accelerator_type == "v4-16"
    assert set(api.nodes) == {f"{PARENT}/nodes/a-0", f"{PARENT}/nodes/a-1"}
    assert (made.phase, made.state, made.size) == (TpuPhase.READY, "queue ACTIVE, READY", "2xv4-16")
    assert [str(host) for host in made.hosts()] == [
        "w0 of slice 0 (127.0.1.1)", "w1 of slice 0 (127.0.1.2)", "w2 of slice 1 (127.0.1.3)",
        "w3 of slice 1 (127.0.1.4)",
    ]  # fmt: skip
    assert [host.address for host in made.hosts(external=True)] == [f"203.0.113.{i}" for i in (1, 2, 3, 4)]
    api.host_keys = {f"127.0.1.{i}": f"ssh-ed25519 KEY{i}" for i in (1, 2, 3, 4)}
    assert tpus.host_keys(made) == {i: [f"ssh-ed25519 KEY{i + 1}"] for i in range(4)}
    alone = tpus.create(TpuRequest("b", V4), timeout_s=LONG_S)
    assert tpus.all() == [made, alone]
    assert tpus.delete("a")
    assert not api.queued
    assert set(api.nodes) == {f"{PARENT}/nodes/b"}


def test_an_existing_tpu_must_have_the_same_slices(api: TpuApi, tpus: Tpus) -> None:
    tpus.create(request(), timeout_s=LONG_S)
    tpus.ensure(request(), timeout_s=LONG_S)
    assert api.calls.count("CreateQueuedResource") == 1
    for other, has in ((request(3), "3xv4-16"), (request(1), "v4-16")):
        with pytest.raises(UserError, match=rf"exists as 2xv4-16, .*, not as {has},"):
            tpus.ensure(other, timeout_s=LONG_S)
    with pytest.raises(UserError, match="a-1 is one of the 2 slices of TPU a: give the name a"):
        tpus.delete("a-1")


@pytest.mark.parametrize("state", [NODE.PREEMPTED, NODE.TERMINATED, NODE.STOPPED])
def test_one_slice_is_preempted(api: TpuApi, tpus: Tpus, state: NODE) -> None:
    """All slices are deleted and created again, because the API creates no single slice of a queued resource."""
    tpus.create(request(), timeout_s=LONG_S)
    api.preempt("a-1", state)
    assert tpus.describe("a").phase is TpuPhase.LOST
    said = f"TPU a is queue ACTIVE, a-0 READY, a-1 {state.name}"
    with pytest.raises(RunError, match=f"TPU a is not ready: {said[9:]}"):
        pod_of(tpus, tpus.describe("a"), Access(""))
    with pytest.raises(TpuFailed, match=f"{said}: delete it and create it again"):
        tpus.create(request(), timeout_s=LONG_S)
    assert tpus.ensure(request(), timeout_s=LONG_S).phase is TpuPhase.READY
    assert api.calls.count("DeleteQueuedResource") == 1
    assert api.calls.count("CreateQueuedResource") == 2


def test_the_cloud_suspends_all_slices(api: TpuApi, tpus: Tpus) -> None:
    tpus.create(request(), timeout_s=LONG_S)
    api.preempt("a")
    assert tpus.ensure(request(), timeout_s=LONG_S).phase is TpuPhase.READY
    assert len(api.nodes) == 2


def test_a_slice_that_the_cloud_repairs(api: TpuApi, tpus: Tpus) -> None:
    """While a slice is missing or not ready, the state of its queued resource decides."""
    tpus.create(request(), timeout_s=LONG_S)
    repaired = api.nodes.pop(f"{PARENT}/nodes/a-0")
    assert tpus.describe("a").state == "queue ACTIVE, a-0 missing, a-1 READY"
    with pytest.raises(TpuFailed, match="timed out"):
        tpus.ensure(request(), timeout_s=0.5)
    repaired.state = NODE.REPAIRING
    api.nodes[repaired.name] = repaired
    assert tpus.describe("a").phase is TpuPhase.PENDING
    repaired.state = NODE.READY
    assert tpus.ensure(request(), timeout_s=LONG_S).phase is TpuPhase.READY
    assert api.calls.count("CreateQueuedResource") == 1


def test_stopped_by_its_owner(api: TpuApi, tpus: Tpus) -> None:
    tpus.create(request(tier="on-demand"), timeout_s=LONG_S)
    api.preempt("a-1", NODE.STOPPED)
    with pytest.raises(UserError, match="tpu-vm start a-1 --zone europe-west4-a"):
        tpus.ensure(request(tier="on-demand"), timeout_s=LONG_S)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slices": 0}, "--slices 0: must be 1 or more"),
        ({"queued": False}, "--slices 2 needs a queued request: add --queued"),
        (
            {"type": slices.parse("v3-32")},
            "2xv3-32: one program runs on several slices of v4 or later only",
        ),
        ({"name": "a" * 62}, "-1 is too long for the name of a slice"),
    ],
)
def test_bad_requests(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        TpuRequest(**{"name": "a", "type": V4, "queued": True, "slices": 2, **changes})
