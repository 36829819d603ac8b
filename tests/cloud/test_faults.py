"""Each error of the API: its kind, its reason, what to do; exit code 2 for what the user can mend, 1 for the rest."""

import pytest
from google.api_core import exceptions
from google.auth.exceptions import DefaultCredentialsError
from google.rpc import code_pb2

from mesh_transformer.cloud.api import Kind, TpuFailed, TpuRefused, explain, from_status
from mesh_transformer.errors import RunError, UserError

STOCKOUTS = [
    "There is no more capacity in the zone europe-west4-a",
    "The zone does not have enough resources available to fulfill the request: stockout",
]
CASES = [
    (exceptions.ResourceExhausted("Quota limit 'TPUV3' has been exceeded. Limit: 0"), Kind.QUOTA, UserError),
    (exceptions.TooManyRequests("Quota exceeded for capacity of TPUs"), Kind.QUOTA, UserError),
    *((exceptions.ResourceExhausted(text), Kind.STOCKOUT, RunError) for text in STOCKOUTS),
    (exceptions.PermissionDenied("no tpu.nodes.create"), Kind.PERMISSION, UserError),
    (exceptions.Forbidden("over HTTP"), Kind.PERMISSION, UserError),
    (exceptions.Unauthenticated("who?"), Kind.CREDENTIALS, UserError),
    (DefaultCredentialsError("none found"), Kind.CREDENTIALS, UserError),
    (exceptions.NotFound("nodes/a"), Kind.NOT_FOUND, UserError),
    (exceptions.AlreadyExists("nodes/a"), Kind.EXISTS, UserError),
    (exceptions.InvalidArgument("accelerator type"), Kind.BAD_REQUEST, UserError),
    (exceptions.FailedPrecondition("not now"), Kind.BAD_REQUEST, UserError),
    (exceptions.ServiceUnavailable("later"), Kind.UNAVAILABLE, RunError),
    (exceptions.InternalServerError("oops"), Kind.UNAVAILABLE, RunError),
    (exceptions.DeadlineExceeded("slow"), Kind.TIMEOUT, RunError),
    (exceptions.Unknown("?"), Kind.UNKNOWN, RunError),
    (exceptions.RetryError("gave up", exceptions.ServiceUnavailable("later")), Kind.UNAVAILABLE, RunError),
]


@pytest.mark.parametrize(("error", "kind", "family"), CASES, ids=lambda value: getattr(value, "name", None))
def test_kinds(error: Exception, kind: Kind, family: type) -> None:
    explained = explain(error, "making TPU a")
    assert isinstance(explained, family)
    assert isinstance(explained, TpuRefused | TpuFailed)
    assert explained.kind is kind
    text = str(explained)
    assert text.startswith(f"making TPU a: {kind.value}: ")
    assert len(text.split(". ")) >= 2, "no advice"


def test_reason_code_is_told_and_used() -> None:
    fault = from_status(
        "listing", code_pb2.PERMISSION_DENIED, "Cloud TPU API has not been used", "SERVICE_DISABLED"
    )
    assert fault.kind is Kind.DISABLED
    assert "[SERVICE_DISABLED]" in str(fault)
    assert "gcloud services enable tpu.googleapis.com" in str(fault)
