"""Paths that may be local or on Google Cloud Storage (`gs://bucket/name`)."""

from __future__ import annotations

import os
import posixpath
from typing import IO, Any

from mesh_transformer.errors import UserError


def is_remote(path: str) -> bool:
    """True for an object-store URL, False for a local path."""
    return path.startswith("gs://")


def join(path: str, *parts: str) -> str:
    """`os.path.join` that keeps `gs://` URLs with forward slashes."""
    return posixpath.join(path, *parts) if is_remote(path) else os.path.join(path, *parts)


def open_binary(path: str, mode: str = "rb") -> IO[bytes]:
    """Open a local or `gs://` file for binary reading or writing, without decompression.

    Raises:
        UserError: a file to be read does not exist.
    """
    if not is_remote(path):
        try:
            return open(path, mode)  # noqa: SIM115  (the caller closes it)
        except FileNotFoundError as error:
            raise UserError(f"no such file: {path}") from error
    import smart_open

    try:
        return smart_open.open(path, mode, compression="disable", transport_params={"client": _gcs_client()})
    except Exception as error:
        if getattr(error, "code", None) == 404 or "404" in str(error):
            raise UserError(f"no such object: {path}") from error
        raise


def exists(path: str) -> bool:
    """Whether a file (local or `gs://`) exists."""
    if not is_remote(path):
        return os.path.exists(path)
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return bool(_gcs_client().bucket(bucket).blob(name).exists())


def _gcs_client() -> Any:
    from google.cloud import storage

    return storage.Client(project=os.environ.get("GOOGLE_CLOUD_PROJECT"))
