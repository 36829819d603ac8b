"""A client of the Cloud TPU API: calls with timeouts and back-off. Errors of the API become exceptions with the reason
and advice for the user.
"""

import enum
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh_transformer.environment import command
from mesh_transformer.errors import RunError, UserError

ADDRESS_VARIABLE = "MTJ_TPU_API"
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")


class ErrorKind(enum.Enum):
    """Why a call to the API failed."""

    QUOTA = "quota"
    STOCKOUT = "no capacity"
    PERMISSION = "permission"
    DISABLED = "API not enabled"
    CREDENTIALS = "credentials"
    NOT_FOUND = "not found"
    BAD_REQUEST = "bad request"
    EXISTS = "exists already"
    UNAVAILABLE = "service unavailable"
    TIMEOUT = "timed out"
    UNKNOWN = "unknown"


_ADVICE = {
    ErrorKind.QUOTA:
        "Request more on https://console.cloud.google.com/iam-admin/quotas (service Cloud TPU API; each zone and each "
        "of spot, preemptible and on-demand has its own quota), delete TPUs that you do not need "
        f"({command('tpu')} list), or use another zone.",
    ErrorKind.STOCKOUT:
        "The zone has no free TPU of this type: wait in the queue (--queued), try another zone or type, or try later.",
    ErrorKind.PERMISSION:
        "The account of the driver needs the roles roles/tpu.admin and roles/iam.serviceAccountUser in the project "
        "(docs/pod.md).",
    ErrorKind.DISABLED: "Enable it: gcloud services enable tpu.googleapis.com --project PROJECT",
    ErrorKind.CREDENTIALS:
        "A Google VM uses its service account; on other machines run: gcloud auth application-default login",
    ErrorKind.NOT_FOUND: f"Check the name, --zone and --project: {command('tpu')} list shows the TPUs of a zone.",
    ErrorKind.BAD_REQUEST:
        "Compare type, zone and runtime version with https://cloud.google.com/tpu/docs/regions-zones and "
        "https://cloud.google.com/tpu/docs/runtimes.",
    ErrorKind.EXISTS: f"Use another name, or delete it first: {command('tpu')} delete NAME",
    ErrorKind.UNAVAILABLE: "The service did not answer: try again later.",
    ErrorKind.TIMEOUT: f"The operation may continue: check it with {command('tpu')} describe.",
    ErrorKind.UNKNOWN: f"Check the state with {command('tpu')} describe.",
}  # fmt: skip
_USER_ERRORS = {
    ErrorKind.QUOTA, ErrorKind.PERMISSION, ErrorKind.DISABLED, ErrorKind.CREDENTIALS, ErrorKind.NOT_FOUND,
    ErrorKind.BAD_REQUEST, ErrorKind.EXISTS,
}  # fmt: skip
# Words of errors with the code of quotas that mean: the zone has none, whatever the quota. And where they were seen.
_STOCKOUTS = {
    "capacity": "TPU API: GoogleCloudPlatform/magic-modules#7297, hashicorp/terraform-provider-google#21243",
    "enough resources available": "Compute Engine: kubernetes/k8s.io#9834, kubernetes/kubernetes#57134",
    "resource_pool_exhausted": "Compute Engine: googlefonts/fontbakery-dashboard#81",
    "currently unavailable": "Compute Engine: kubernetes/k8s.io#9834, benseverndev-oss/goldenmatch#2771",
    "stockout": "Compute Engine: kubernetes/k8s.io#9834",
    "resources are insufficient": "Compute Engine, in queues",
    "not enough resources": "Compute Engine, in queues",
}
_BY_GRPC_CODE = {
    1: ErrorKind.UNKNOWN, 2: ErrorKind.UNKNOWN, 3: ErrorKind.BAD_REQUEST, 4: ErrorKind.TIMEOUT, 5: ErrorKind.NOT_FOUND,
    6: ErrorKind.EXISTS, 7: ErrorKind.PERMISSION, 9: ErrorKind.BAD_REQUEST, 10: ErrorKind.UNAVAILABLE,
    11: ErrorKind.BAD_REQUEST, 12: ErrorKind.BAD_REQUEST, 13: ErrorKind.UNAVAILABLE, 14: ErrorKind.UNAVAILABLE,
    16: ErrorKind.CREDENTIALS,
}  # fmt: skip
_RESOURCE_EXHAUSTED = 8


class _ErrorOfKind(Exception):
    def __init__(self, message: str, kind: ErrorKind):
        super().__init__(message)
        self.kind = kind


class TpuRefused(_ErrorOfKind, UserError):
    """The API refused the request for a reason that the user can correct; `kind` is the reason."""


class TpuFailed(_ErrorOfKind, RunError):
    """The API failed; a later attempt or another zone may succeed. `kind` is the reason."""


TpuError = TpuRefused | TpuFailed


def tpu_error(doing: str, kind: ErrorKind, said: str, reason: str | None = None) -> TpuError:
    """The exception for a failed call.

    Args:
        doing: description of the call.
        said: the message of the API.
        reason: the API's reason code.
    """
    said = said.strip().rstrip(".")
    text = f"{doing}: {kind.value}: {said}{f' [{reason}]' if reason else ''}. {_ADVICE[kind]}"
    return TpuRefused(text, kind) if kind in _USER_ERRORS else TpuFailed(text, kind)


def from_status(doing: str, code: int, message: str, reason: str | None = None) -> TpuError:
    """The exception for a `google.rpc.Status` of a failed operation or queued resource."""
    return tpu_error(doing, _kind(code, message, reason), message, reason)


def translate(error: Exception, doing: str) -> TpuError:
    """The exception for an `error` of google-cloud-tpu or google-auth in the call `doing`."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, GoogleAuthError):
        return tpu_error(doing, ErrorKind.CREDENTIALS, str(error))
    if isinstance(error, exceptions.RetryError):
        return tpu_error(doing, ErrorKind.UNAVAILABLE, str(error.cause or error))
    if isinstance(error, exceptions.GoogleAPICallError):
        return from_status(doing, _grpc_code(error), error.message or str(error), error.reason)
    return tpu_error(doing, ErrorKind.UNKNOWN, str(error))


def _kind(code: int, message: str, reason: str | None) -> ErrorKind:
    if code == _RESOURCE_EXHAUSTED:
        # this code means quota or capacity; in a failed operation only the message differs
        words = f"{message} {reason}".lower()
        out_of_stock = "quota" not in words and any(word in words for word in _STOCKOUTS)
        return ErrorKind.STOCKOUT if out_of_stock else ErrorKind.QUOTA
    if reason == "SERVICE_DISABLED":
        return ErrorKind.DISABLED
    return _BY_GRPC_CODE.get(code, ErrorKind.UNKNOWN)


def _grpc_code(error: Any) -> int:
    """The code of `google.rpc.Code`. Errors from HTTP have only the HTTP status."""
    if error.grpc_status_code is not None:
        return int(error.grpc_status_code.value[0])
    http = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14, 504: 4}
    return http.get(int(error.code or 0), 2)


@dataclass(frozen=True)
class Timing:
    """Time limits and pauses, in seconds.

    Args:
        call_s: limit for one attempt of a call.
        retry_s: limit for all attempts of a call while the service is unavailable.
        pause_s: first pause between two attempts or two polls of a state; it doubles each time.
    """

    call_s: float = 60.0
    retry_s: float = 120.0
    pause_s: float = 1.0
    longest_pause_s: float = 30.0


def connect() -> Any:
    """A `TpuClient` with the credentials of this machine.

    For tests, MTJ_TPU_API=ADDRESS:PORT selects a server on this machine, without encryption and credentials. Addresses
    of other machines are rejected, so that no unencrypted data leaves this machine.

    Raises:
        UserError: MTJ_TPU_API is the address of another machine.
        TpuRefused: there are no credentials.
    """
    from google.cloud.tpu_v2 import TpuClient

    address = os.environ.get(ADDRESS_VARIABLE)
    if address:
        import grpc
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        return TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(_on_this_machine(address))))
    with translated_errors("connecting to the Cloud TPU API"):
        return TpuClient()


def _on_this_machine(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.socket() as probe:
            # the kernel refuses addresses of other machines
            probe.bind((host, 0))
        int(port)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{ADDRESS_VARIABLE}={address}: give ADDRESS:PORT, an address of this machine, or unset it to use Google's "
            "API"
        ) from error
    return address


def project_of(given: str | None) -> str:
    """The project: `given`, or the project of the environment, or the project of the default credentials.

    Raises:
        UserError: no project is set.
    """
    project = next(filter(None, (given, *map(os.environ.get, PROJECT_VARIABLES))), None)
    if project is None and not os.environ.get(ADDRESS_VARIABLE):
        import google.auth

        with translated_errors("looking for the project"):
            _, project = google.auth.default()
    if project:
        return project
    raise UserError(f"no project is set: give --project, or set {PROJECT_VARIABLES[0]}")


@contextmanager
def translated_errors(doing: str) -> Iterator[None]:
    """Translates errors of Google's libraries to `TpuRefused` or `TpuFailed`."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except (GoogleAPIError, GoogleAuthError) as error:
        raise translate(error, doing) from error


def call(method: Callable[..., Any], doing: str, timing: Timing, **request: Any) -> Any:
    """Call a method of a client, with retries while the service is unavailable.

    Args:
        method: method of a `TpuClient`.
        doing: description for messages, such as "creating TPU a".
        timing: time limits.
        request: the fields of the request.

    Raises:
        TpuRefused, TpuFailed: the call failed, or the service was unavailable for `timing.retry_s`.
    """
    with translated_errors(doing):
        return method(request=request, timeout=timing.call_s, retry=retries(timing))


def retries(timing: Timing) -> Any:
    """The retry policy for calls while the service is unavailable."""
    from google.api_core import retry
    from google.api_core.exceptions import Aborted, DeadlineExceeded, InternalServerError, ServiceUnavailable

    transient = retry.if_exception_type(Aborted, DeadlineExceeded, InternalServerError, ServiceUnavailable)
    return retry.Retry(transient, timing.pause_s, timing.longest_pause_s, timeout=timing.retry_s)


def pauses(timing: Timing) -> Iterator[float]:
    """An endless sequence of growing pauses, in seconds."""
    pause_s = timing.pause_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, timing.longest_pause_s)
