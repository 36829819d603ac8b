"""Joins the Ray cluster at an address."""

import logging
import socket
from typing import Any

from mesh_transformer.errors import UserError

CONNECT_TIMEOUT_S = 10.0


def join(address: str, **options: Any) -> None:
    """Join a cluster, with further options of `ray.init`.

    Raises:
        UserError: none answers at the address.
    """
    import ray
    from ray.exceptions import RayError

    try:
        # Ray itself would try for three minutes
        probe(address, CONNECT_TIMEOUT_S)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, RayError, ValueError) as error:
        raise UserError(
            f"no Ray cluster answers at {address}: {first_line(error)}. If the cluster needs a token, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
        ) from error


def probe(address: str, timeout_s: float) -> None:
    """Raises OSError if nothing listens at host:port. Other forms of address are not checked."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout_s).close()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
