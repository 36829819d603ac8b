"""A client of the Cloud TPU API, and calls to it with time-outs, back-off and errors that say what to do."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh_transformer.cloud.faults import explain
from mesh_transformer.errors import UserError

ADDRESS_VARIABLE = "MTJ_TPU_API"
PROJECT_VARIABLES = ("GOOGLE_CLOUD_PROJECT", "CLOUDSDK_CORE_PROJECT")


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
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.tpu_v2 import TpuClient

    address = os.environ.get(ADDRESS_VARIABLE)
    if address:
        import grpc
        from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

        return TpuClient(transport=TpuGrpcTransport(channel=grpc.insecure_channel(_on_this_machine(address))))
    try:
        return TpuClient()
    except GoogleAuthError as error:
        raise explain(error, "connecting to the Cloud TPU API") from error


def _on_this_machine(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))  # the kernel refuses addresses that are not this machine's
        int(port)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{ADDRESS_VARIABLE}={address}: give ADDRESS:PORT with an address of this machine, such as 127.0.0.1:8080; "
            "unset it to use Google's API"
        ) from error
    return address


def project_of(given: str | None) -> str:
    """The project: the one given, or the environment's, or that of the default credentials.

    Raises:
        UserError: none is known.
    """
    for value in (given, *(os.environ.get(name) for name in PROJECT_VARIABLES)):
        if value:
            return value
    if not os.environ.get(ADDRESS_VARIABLE):
        import google.auth
        from google.auth.exceptions import GoogleAuthError

        try:
            _, project = google.auth.default()
        except GoogleAuthError as error:
            raise explain(error, "looking for the project") from error
        if project:
            return str(project)
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
