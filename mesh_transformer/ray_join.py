"""Joins the Ray cluster at an address."""

import logging
import re
import socket
from importlib import metadata
from typing import Any

from mesh_transformer.errors import UserError

CONNECT_TIMEOUT_S = 10.0
# earlier ones cannot ask for a token; requirements.txt says the same
OLDEST = (2, 52)


def check_version() -> None:
    """Raises UserError if Ray is not installed, or is older than OLDEST."""
    oldest = ".".join(map(str, OLDEST))
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError as error:
        raise UserError(f"Ray {oldest} or newer is needed: pip install -r requirements.txt") from error
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise UserError(
            f"this is Ray {version}, whose clusters run the code of everybody who reaches their ports; Ray {oldest} or "
            "newer is needed, which asks for a token: pip install -r requirements.txt"
        )


def join(address: str, **options: Any) -> None:
    """Join a cluster, with further options of `ray.init`.

    Raises:
        UserError: Ray is too old; or no cluster answers at the address, or it has other versions of Ray or Python.
    """
    check_version()
    import ray
    from ray.exceptions import RayError

    try:
        # Ray itself would try for three minutes
        probe(address, CONNECT_TIMEOUT_S)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    # RuntimeError: other versions, or a connection that fails
    except (OSError, RayError, ValueError, RuntimeError) as error:
        if versions := re.findall(r"\b(Ray|Python): (\S+)", str(error)):
            words = [f"{name} {version}" for name, version in versions]
            raise UserError(
                f"the Ray cluster at {address} has {' and '.join(words[:2])}, and this process has "
                f"{' and '.join(words[2:])}: use the same versions"
            ) from error
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
