"""The phase of each state of the API. Every state of the client library has a row."""

import pytest
from google.cloud.tpu_v2.types import cloud_tpu

from mesh_transformer.cloud.state import TpuPhase, phase_of

PENDING, READY, DELETING, LOST, STOPPED = (
    TpuPhase.PENDING,
    TpuPhase.READY,
    TpuPhase.DELETING,
    TpuPhase.LOST,
    TpuPhase.STOPPED,
)
NODES = {
    "STATE_UNSPECIFIED": PENDING, "CREATING": PENDING, "READY": READY, "RESTARTING": PENDING, "REIMAGING": PENDING,
    "DELETING": DELETING, "REPAIRING": PENDING, "STOPPED": STOPPED, "STOPPING": STOPPED, "STARTING": PENDING,
    "PREEMPTED": LOST,
    "TERMINATED": LOST, "HIDING": PENDING, "HIDDEN": PENDING, "UNHIDING": PENDING, "UNKNOWN": PENDING,
}  # fmt: skip
QUEUED = {
    "STATE_UNSPECIFIED": PENDING, "CREATING": PENDING, "ACCEPTED": PENDING, "PROVISIONING": PENDING, "FAILED": LOST,
    "DELETING": DELETING, "ACTIVE": PENDING, "SUSPENDING": DELETING, "SUSPENDED": LOST,
    "WAITING_FOR_RESOURCES": PENDING,
}  # fmt: skip


def test_tables_are_complete() -> None:
    assert set(NODES) == {state.name for state in cloud_tpu.Node.State}
    assert set(QUEUED) == {state.name for state in cloud_tpu.QueuedResourceState.State}


@pytest.mark.parametrize("state", NODES)
def test_node(state: str) -> None:
    assert phase_of(state, "HEALTHY", None) is NODES[state]
    assert phase_of(state, "HEALTHY", "ACTIVE") is NODES[state]


@pytest.mark.parametrize("state", QUEUED)
def test_queue_without_a_node(state: str) -> None:
    assert phase_of(None, "", state) is QUEUED[state]


@pytest.mark.parametrize("state", ["FAILED", "SUSPENDED", "SUSPENDING"])
def test_the_queue_overrules_a_ready_node(state: str) -> None:
    assert phase_of("READY", "HEALTHY", state) is QUEUED[state]


def test_a_ready_node_is_pending_until_its_queued_resource_is_active() -> None:
    assert phase_of("READY", "HEALTHY", "PROVISIONING") is PENDING


def test_spot_and_health() -> None:
    assert phase_of("STOPPED", "HEALTHY", None, spot=True) is LOST
    assert phase_of("READY", "UNHEALTHY_MAINTENANCE", None) is PENDING
    assert phase_of("READY", "HEALTH_UNSPECIFIED", None) is READY
