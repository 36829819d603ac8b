"""Errors of the API: kind, reason, advice, and exit code 2 if the user can correct them, 1 otherwise."""

import pytest
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError
from google.rpc import code_pb2

from mesh_transformer.cloud.api import ErrorKind, TpuFailed, TpuRefused, from_status, translate
from mesh_transformer.errors import RunError, UserError

STOCKOUTS = [
    "There is no more capacity in the zone europe-west4-a",
    "The zone does not have enough resources available to fulfill the request: stockout",
    "The zone 'projects/p/zones/z' does not have enough resources available to fulfill the request. Try a different "
    "zone, or try again later.",
    "ZONE_RESOURCE_POOL_EXHAUSTED: A n2-highmem-32 VM instance is not available",
    "A ct5lp VM instance is currently unavailable in the us-central1-a zone.",
]
CASES = [
    (
        exceptions.ResourceExhausted("Quota limit 'TPUV3' has been exceeded. Limit: 0"),
        ErrorKind.QUOTA,
        UserError,
    ),
    (exceptions.TooManyRequests("Quota exceeded for capacity of TPUs"), ErrorKind.QUOTA, UserError),
    *((exceptions.ResourceExhausted(text), ErrorKind.STOCKOUT, RunError) for text in STOCKOUTS),
    (exceptions.PermissionDenied("no tpu.nodes.create"), ErrorKind.PERMISSION, UserError),
    (exceptions.Forbidden("over HTTP"), ErrorKind.PERMISSION, UserError),
    (exceptions.Unauthenticated("who?"), ErrorKind.CREDENTIALS, UserError),
    (DefaultCredentialsError("none found"), ErrorKind.CREDENTIALS, UserError),
    (exceptions.NotFound("nodes/a"), ErrorKind.NOT_FOUND, UserError),
    (exceptions.AlreadyExists("nodes/a"), ErrorKind.EXISTS, UserError),
    (exceptions.InvalidArgument("accelerator type"), ErrorKind.BAD_REQUEST, UserError),
    (exceptions.FailedPrecondition("not now"), ErrorKind.BAD_REQUEST, UserError),
    (exceptions.ServiceUnavailable("later"), ErrorKind.UNAVAILABLE, RunError),
    (exceptions.InternalServerError("oops"), ErrorKind.UNAVAILABLE, RunError),
    (exceptions.DeadlineExceeded("slow"), ErrorKind.TIMEOUT, RunError),
    (exceptions.Unknown("?"), ErrorKind.UNKNOWN, RunError),
    (
        exceptions.RetryError("gave up", exceptions.ServiceUnavailable("later")),
        ErrorKind.UNAVAILABLE,
        RunError,
    ),
]


@pytest.mark.parametrize(("error", "kind", "family"), CASES, ids=lambda value: getattr(value, "name", None))
def test_kinds(error: Exception, kind: ErrorKind, family: type) -> None:
    explained = translate(error, "creating TPU a")
    assert isinstance(explained, family)
    assert isinstance(explained, TpuRefused | TpuFailed)
    assert explained.kind is kind
    text = str(explained)
    assert text.startswith(f"creating TPU a: {kind.value}: ")
    assert len(text.split(". ")) >= 2, "no advice"


def test_a_reason_may_be_the_only_word() -> None:
    error = from_status("creating", code_pb2.RESOURCE_EXHAUSTED, "failed", "ZONE_RESOURCE_POOL_EXHAUSTED")
    assert error.kind is ErrorKind.STOCKOUT


def test_reason_code_is_used_and_shown() -> None:
    fault = from_status("listing", code_pb2.PERMISSION_DENIED, "Cloud TPU API has not been used", "SERVICE_DISABLED")
    assert fault.kind is ErrorKind.DISABLED
    assert "[SERVICE_DISABLED]" in str(fault)
    assert "gcloud services enable tpu.googleapis.com" in str(fault)
