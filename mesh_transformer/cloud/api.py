"""A client of the Cloud TPU API, and calls to it with time-outs and back-off. What the API refused or failed to do becomes an
error that says why, and what to do about it.
"""

import enum
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh_transformer.errors import RunError, UserError

ADDRESS_VARIABLE = "MTJ_TPU_API"
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")


class Kind(enum.Enum):
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
    Kind.QUOTA: "Ask for more on https://console.cloud.google.com/iam-admin/quotas (service Cloud TPU API; spot, preemptible and "
    "on-demand cores have quotas of their own, by zone), delete what you no longer need (tpu_utils.py list), or take another zone.",
    Kind.STOCKOUT: "The zone has none free now: wait in the queue (--queued), try another zone or type, or try later.",
    Kind.PERMISSION: "The account of the driver needs the roles roles/tpu.admin and roles/iam.serviceAccountUser in the project "
    "(docs/pod.md).",
    Kind.DISABLED: "Enable it: gcloud services enable tpu.googleapis.com --project PROJECT",
    Kind.CREDENTIALS: "On a Google VM its service account is used; elsewhere run: gcloud auth application-default login",
    Kind.NOT_FOUND: "Look at the name, --zone and --project: tpu_utils.py list shows what there is.",
    Kind.BAD_REQUEST: "Compare type, zone and runtime version with https://cloud.google.com/tpu/docs/regions-zones and "
    "https://cloud.google.com/tpu/docs/runtimes.",
    Kind.EXISTS: "Take another name, or delete it first: tpu_utils.py delete NAME",
    Kind.UNAVAILABLE: "The service gave no answer for a while: try again later.",
    Kind.TIMEOUT: "It may still be going on: look with tpu_utils.py describe.",
    Kind.UNKNOWN: "Look with tpu_utils.py describe.",
}  # fmt: skip
_MENDED_BY_USER = {
    Kind.QUOTA, Kind.PERMISSION, Kind.DISABLED, Kind.CREDENTIALS, Kind.NOT_FOUND, Kind.BAD_REQUEST, Kind.EXISTS,
}  # fmt: skip
_STOCKOUT_WORDS = ("capacity", "stockout", "not enough resources", "resources are insufficient")
_BY_GRPC_CODE = {
    1: Kind.UNKNOWN, 2: Kind.UNKNOWN, 3: Kind.BAD_REQUEST, 4: Kind.TIMEOUT, 5: Kind.NOT_FOUND, 6: Kind.EXISTS,
    7: Kind.PERMISSION, 9: Kind.BAD_REQUEST, 10: Kind.UNAVAILABLE, 11: Kind.BAD_REQUEST, 12: Kind.BAD_REQUEST,
    13: Kind.UNAVAILABLE, 14: Kind.UNAVAILABLE, 16: Kind.CREDENTIALS,
}  # fmt: skip
_RESOURCE_EXHAUSTED = 8


class _OfKind(Exception):
    def __init__(self, message: str, kind: Kind):
        super().__init__(message)
        self.kind = kind


class TpuRefused(_OfKind, UserError):
    """The API refused for a reason that the user can mend; `kind` says which."""


class TpuFailed(_OfKind, RunError):
    """The API failed for a reason that time or another zone mends; `kind` says which."""


Fault = TpuRefused | TpuFailed


def fault(doing: str, kind: Kind, said: str, reason: str | None = None) -> Fault:
    """The exception to raise: what was being done, what the API said, its reason code, and what to do."""
    said = said.strip().rstrip(".")
    text = f"{doing}: {kind.value}: {said}{f' [{reason}]' if reason else ''}. {_ADVICE[kind]}"
    return TpuRefused(text, kind) if kind in _MENDED_BY_USER else TpuFailed(text, kind)


def from_status(doing: str, code: int, message: str, reason: str | None = None) -> Fault:
    """The exception for a `google.rpc.Status`, as failed operations and queued resources carry it."""
    return fault(doing, _kind(code, message, reason), message, reason)


def explain(error: Exception, doing: str) -> Fault:
    """The exception that tells what `error` of google-cloud-tpu (or google-auth) means for somebody doing `doing`."""
    from google.api_core import exceptions
    from google.auth.exceptions import GoogleAuthError

    if isinstance(error, GoogleAuthError):
        return fault(doing, Kind.CREDENTIALS, str(error))
    if isinstance(error, exceptions.RetryError):
        return fault(doing, Kind.UNAVAILABLE, str(error.cause or error))
    if isinstance(error, exceptions.GoogleAPICallError):
        return from_status(doing, _grpc_code(error), error.message or str(error), error.reason)
    return fault(doing, Kind.UNKNOWN, str(error))


def _kind(code: int, message: str, reason: str | None) -> Kind:
    if code == _RESOURCE_EXHAUSTED:
        # one code for two things; a failed operation has only words to tell them apart
        words = message.lower()
        out_of_stock = "quota" not in words and any(word in words for word in _STOCKOUT_WORDS)
        return Kind.STOCKOUT if out_of_stock else Kind.QUOTA
    if reason == "SERVICE_DISABLED":
        return Kind.DISABLED
    return _BY_GRPC_CODE.get(code, Kind.UNKNOWN)


def _grpc_code(error: Any) -> int:
    """The code of `google.rpc.Code`; errors that came over HTTP have only the HTTP status."""
    if error.grpc_status_code is not None:
        return int(error.grpc_status_code.value[0])
    http = {400: 3, 401: 16, 403: 7, 404: 5, 409: 6, 429: 8, 500: 13, 503: 14, 504: 4}
    return http.get(int(error.code or 0), 2)


@dataclass(frozen=True)
class Timing:
    """How patient calls and waits are, in seconds."""

    call_s: float = 60.0  # one attempt of one call
    retry_s: float = 120.0  # all attempts of one call that the service cannot answer
    pause_s: float = 1.0  # between attempts and between looks at a state, at first; doubles
    longest_pause_s: float = 30.0


def connect() -> Any:
    """A `TpuClient` with the credentials of this machine.

    With MTJ_TPU_API=ADDRESS:PORT it talks to a server on this machine instead, in plain text and without credentials: for
    tests. Only an address of this machine is taken, so that nothing unencrypted leaves it.

    Raises:
        UserError: MTJ_TPU_API names another machine.
        TpuRefused: there are no credentials.
    """
    from google.cloud.tpu_v2 import TpuClient

    address = os.environ.get(ADDRESS_VARIABLE)
    if address:
        import grpc
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        return TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(_on_this_machine(address))))
    with explained("connecting to the Cloud TPU API"):
        return TpuClient()


def _on_this_machine(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))  # the kernel refuses addresses that are not this machine's
        int(port)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{ADDRESS_VARIABLE}={address}: give ADDRESS:PORT, an address of this machine, or unset it to use Google's API"
        ) from error
    return address


def project_of(given: str | None) -> str:
    """The project: the one given, or the environment's, or that of the default credentials.

    Raises:
        UserError: none is known.
    """
    project = next(filter(None, (given, *map(os.environ.get, PROJECT_VARIABLES))), None)
    if project is None and not os.environ.get(ADDRESS_VARIABLE):
        import google.auth

        with explained("looking for the project"):
            _, project = google.auth.default()
    if project:
        return project
    raise UserError(f"no project is known: give --project, or set {PROJECT_VARIABLES[0]}")


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Errors of Google's libraries inside become `TpuRefused` or `TpuFailed`."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError

    try:
        yield
    except (GoogleAPIError, GoogleAuthError) as error:
        raise explain(error, doing) from error


def call(method: Callable[..., Any], doing: str, timing: Timing, **request: Any) -> Any:
    """Call one method of a client, again and again while the service is unavailable.

    Args:
        method: of a `TpuClient`.
        doing: for messages, such as "making TPU a".
        timing: how long to try.
        request: the fields of the request.

    Raises:
        TpuRefused, TpuFailed: the call failed, or did so for `timing.retry_s`.
    """
    with explained(doing):
        return method(request=request, timeout=timing.call_s, retry=retries(timing))


def retries(timing: Timing) -> Any:
    """The policy of Google's libraries for calls that the service cannot answer now."""
    from google.api_core import retry
    from google.api_core.exceptions import Aborted, DeadlineExceeded, InternalServerError, ServiceUnavailable

    transient = retry.if_exception_type(Aborted, DeadlineExceeded, InternalServerError, ServiceUnavailable)
    return retry.Retry(transient, timing.pause_s, timing.longest_pause_s, timeout=timing.retry_s)


def pauses(timing: Timing) -> Iterator[float]:
    """Growing pauses in seconds, for ever."""
    pause_s = timing.pause_s
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, timing.longest_pause_s)
