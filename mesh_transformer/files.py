"""Paths that may be local or on Google Cloud Storage (`gs://bucket/name`).

Storage calls are retried for two minutes, with exponential backoff, after responses 408, 429 and 5xx and after lost
connections; then the library's own exception is raised. If credentials are missing or refused, every function raises
CredentialsError.
"""

import contextlib
import os
import posixpath
import shutil
import uuid
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Protocol

from mesh_transformer import liveness
from mesh_transformer.errors import CredentialsError, UserError, set_options

RETRY_FIRST_S = 0.2
RETRY_MAX_S = 20.0
RETRY_TOTAL_S = 120.0
# size of one read from a bucket: it is copied into the buffer, and retried as a whole
REMOTE_READ_BYTES = 16 << 20
# size of a block that `copy_range` passes on
COPY_BYTES = 1 << 20


class Writable(Protocol):
    """A target for blocks of bytes, such as a file."""

    def write(self, block: bytes, /) -> object:
        """Take a block."""


@contextlib.contextmanager
def scratch_file(folder: str) -> Iterator[str]:
    """A unique path in `folder`. A file that is still there at the end is deleted."""
    path = os.path.join(folder, f".{uuid.uuid4().hex}.tmp")
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def is_remote(path: str) -> bool:
    """True for an object-store URL, False for a local path."""
    return path.startswith("gs://")


def join(path: str, *parts: str) -> str:
    """`os.path.join` that uses forward slashes in `gs://` URLs."""
    return posixpath.join(path, *parts) if is_remote(path) else os.path.join(path, *parts)


def remote_call(path: str) -> contextlib.AbstractContextManager[None]:
    """Marks a storage call of another library, so that the watchdog does not take its wait for a hang."""
    return liveness.service_call() if is_remote(path) else contextlib.nullcontext()


def open_binary(path: str, mode: str = "rb") -> IO[bytes]:
    """Open a local or `gs://` file for binary reading or writing, without decompression.

    An object in a bucket appears when its file is closed; where the `with` block raises, it does not appear.

    Raises:
        UserError: the file to read does not exist.
    """
    if not is_remote(path):
        try:
            # the caller closes it
            return open(path, mode)  # noqa: SIM115
        except FileNotFoundError as error:
            raise UserError(f"no such file: {path}{seen_from(path)}") from error
    import smart_open

    params = {"client": _gcs_client(), "blob_open_kwargs": {"retry": _retry()}}
    with _missing_explained(path):
        return smart_open.open(path, mode, compression="disable", transport_params=params)


def exists(path: str) -> bool:
    """Whether a file (local or `gs://`) exists."""
    if not is_remote(path):
        return os.path.exists(path)
    return bool(_blob(path).exists(retry=_retry()))


def is_file(path: str) -> bool:
    """Whether a path (local or `gs://`) is a file, and no folder."""
    return exists(path) if is_remote(path) else os.path.isfile(path)


def size(path: str) -> int:
    """Size of a file (local or `gs://`), bytes.

    Raises:
        UserError: the file does not exist.
    """
    if not is_remote(path):
        if not os.path.isfile(path):
            raise UserError(f"no such file: {path}{seen_from(path)}")
        return os.path.getsize(path)
    blob = _blob(path)
    with _missing_explained(path):
        blob.reload(retry=_retry())
    return int(blob.size)


def read_range(path: str, start: int, length: int) -> bytes:
    """Bytes `start` to `start + length` of a file (local or `gs://`); fewer, if the file ends before.

    Raises:
        UserError: the file does not exist.
    """
    if length <= 0:
        return b""
    if not is_remote(path):
        with open_binary(path) as file:
            file.seek(start)
            return file.read(length)
    from google.api_core.exceptions import RequestRangeNotSatisfiable

    span = {"start": start, "end": start + length - 1, "raw_download": True, "checksum": None}
    try:
        with _missing_explained(path):
            return bytes(_blob(path).download_as_bytes(**span, retry=_retry()))
    except RequestRangeNotSatisfiable:
        return b""


def read_into(path: str, start: int, buffer: memoryview) -> int:
    """Fill a buffer from byte `start` of a file (local or `gs://`); returns the number of bytes read.

    Raises:
        UserError: the file does not exist.
    """
    if is_remote(path):
        for at in range(0, len(buffer), REMOTE_READ_BYTES):
            chunk = buffer[at : at + REMOTE_READ_BYTES]
            content = read_range(path, start + at, len(chunk))
            chunk[: len(content)] = content
            if len(content) < len(chunk):
                return at + len(content)
        return len(buffer)
    with open_binary(path) as file:
        file.seek(start)
        return file.readinto(buffer)  # type: ignore[attr-defined]


def copy_range(path: str, start: int, stop: int, target: Writable) -> None:
    """Append bytes `start` to `stop` of a file (local or `gs://`) to `target` in blocks. On `gs://` it is one request.

    Raises:
        UserError: the file does not exist.
    """
    if is_remote(path):
        download(path, start, stop, target)
        return
    with open_binary(path) as file:
        file.seek(start)
        while block := file.read(min(COPY_BYTES, stop - file.tell())):
            target.write(block)


def download(path: str, start: int, stop: int | None, target: Writable) -> None:
    """Append bytes `start` to `stop` of a `gs://` object to `target` in blocks, with one request where no fault occurs.

    Args:
        stop: end of the range, bytes. None, or a position after the end of the object: the end of the object.

    Raises:
        UserError: the object does not exist.
    """
    from google.api_core.exceptions import RequestRangeNotSatisfiable

    span = {"start": start, "end": None if stop is None else stop - 1, "raw_download": True, "checksum": None}
    with _refusal_explained(path), contextlib.suppress(RequestRangeNotSatisfiable):
        _blob(path).download_to_file(target, **span, retry=_retry())


def objects(prefix: str) -> list[tuple[str, int]]:
    """Path and size, bytes, of each object whose `gs://` path begins with `prefix`, sorted by path.

    Raises:
        UserError: there is no such bucket.
    """
    bucket, _, name = prefix.removeprefix("gs://").partition("/")
    with _refusal_explained(prefix):
        blobs = _gcs_client().list_blobs(bucket, prefix=name, retry=_retry())
        return sorted((f"gs://{bucket}/{blob.name}", int(blob.size)) for blob in blobs)


def make_folder(path: str) -> None:
    """Create a local folder and its parents; `gs://` needs no folders."""
    if not is_remote(path):
        os.makedirs(path, exist_ok=True)


def check_writable(folder: str) -> None:
    """Refuse a local folder in which this process cannot create files. The folder need not exist.

    Raises:
        UserError: it is not writable, or it or a folder above it is a file.
    """
    existing = os.path.abspath(folder)
    while not os.path.lexists(existing):
        existing = os.path.dirname(existing)
    if not os.path.isdir(existing):
        raise UserError(f"{existing} is a file: choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"{existing} is not writable: choose another folder")


def list_dir(path: str) -> list[str]:
    """Sorted names of the files and folders in a folder; empty if the folder does not exist."""
    if not is_remote(path):
        return sorted(os.listdir(path)) if os.path.isdir(path) else []
    bucket, prefix = _split_folder(path)
    pages = _gcs_client().list_blobs(bucket, prefix=prefix, delimiter="/", retry=_retry())
    names = {blob.name.removeprefix(prefix) for blob in pages} | {
        folder.removeprefix(prefix).rstrip("/") for folder in pages.prefixes
    }
    return sorted(names - {""})


def seen_from(path: str) -> str:
    """For a message about a relative path that does not exist: the current folder, which may be the mistake. Empty for
    an absolute path, a URL, or a path that exists."""
    relative = not is_remote(path) and not os.path.isabs(path) and not os.path.exists(path)
    return f" (the current folder is {os.getcwd()})" if relative else ""


def upload(source: str, target: str) -> None:
    """Copy a local file to a local or `gs://` path, atomically: a reader sees the old content or the new one.

    Raises:
        UserError: `source` does not exist.
    """
    if not os.path.isfile(source):
        raise UserError(f"no such file: {source}")
    if is_remote(target):
        _blob(target).upload_from_filename(source, retry=_retry())
    else:
        _write_whole(target, lambda partial: shutil.copyfile(source, partial))


def replace(path: str, content: bytes) -> None:
    """Write a small file, atomically: a reader sees the old content or the new one."""
    if is_remote(path):
        _blob(path).upload_from_string(content, content_type="application/octet-stream", retry=_retry())
    else:
        _write_whole(path, lambda partial: Path(partial).write_bytes(content))


def _write_whole(path: str, write: Callable[[str], object]) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    partial = f"{path}.tmp"
    try:
        write(partial)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise


def remove(path: str) -> None:
    """Delete a file. On `gs://` the file may be missing."""
    if is_remote(path):
        _remove_blobs([_blob(path)])
    else:
        os.remove(path)


def remove_tree(path: str) -> None:
    """Delete a folder and its content. On `gs://` objects may disappear meanwhile."""
    if is_remote(path):
        _remove_blobs(_blobs_under(path))
    else:
        shutil.rmtree(path)


def move_tree(source: str, target: str) -> None:
    """Move a folder within the local disk (one rename) or within Cloud Storage (copies all objects, then deletes them).

    After an interrupted move in Cloud Storage, the source or the target is complete.
    """
    if not is_remote(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.rename(source, target)
        return
    (_, old), (bucket, new) = _split_folder(source), _split_folder(target)
    blobs = _blobs_under(source)
    for blob in blobs:
        copy = _gcs_client().bucket(bucket).blob(new + blob.name.removeprefix(old))
        token, _, _ = copy.rewrite(blob, retry=_retry())
        # a large object takes several calls
        while token is not None:
            token, _, _ = copy.rewrite(blob, token=token, retry=_retry())
    _remove_blobs(blobs)


def _blobs_under(path: str) -> list[Any]:
    bucket, prefix = _split_folder(path)
    return list(_gcs_client().list_blobs(bucket, prefix=prefix, retry=_retry()))


def _remove_blobs(blobs: list[Any]) -> None:
    from google.api_core.exceptions import NotFound

    for blob in blobs:
        with contextlib.suppress(NotFound):
            blob.delete(retry=_retry())


def _blob(path: str) -> Any:
    bucket, _, name = path.removeprefix("gs://").partition("/")
    return _gcs_client().bucket(bucket).blob(name)


@contextlib.contextmanager
def _missing_explained(path: str) -> Iterator[None]:
    from google.api_core.exceptions import NotFound

    try:
        yield
    except NotFound as error:
        raise UserError(f"no such object: {path}") from error


@contextlib.contextmanager
def _refusal_explained(path: str) -> Iterator[None]:
    from google.api_core.exceptions import Forbidden

    try:
        with _missing_explained(path):
            yield
    except Forbidden as error:
        raise UserError(f"{path}: the bucket refuses it; this account needs the role Storage Object User") from error


def _split_folder(path: str) -> tuple[str, str]:
    bucket, _, name = path.removeprefix("gs://").partition("/")
    name = name.strip("/")
    return bucket, f"{name}/" if name else ""


def _retry() -> Any:
    """The retry policy for the library: a decorator that retries a call, and marks it for the watchdog while it
    lasts."""
    from google.cloud.storage.retry import DEFAULT_RETRY

    policy = DEFAULT_RETRY.with_delay(initial=RETRY_FIRST_S, maximum=RETRY_MAX_S).with_timeout(RETRY_TOTAL_S)

    def decorator(call: Callable[..., Any]) -> Callable[..., Any]:
        retried = policy(call)

        def marked(*arguments: Any, **named: Any) -> Any:
            with liveness.service_call(), _credentials_explained():
                return retried(*arguments, **named)

        return marked

    return decorator


def _gcs_client() -> Any:
    with _credentials_explained():
        return _cached_client(os.environ.get("GOOGLE_CLOUD_PROJECT"), os.environ.get("STORAGE_EMULATOR_HOST"))


@contextlib.contextmanager
def _credentials_explained() -> Iterator[None]:
    from google.auth.exceptions import DefaultCredentialsError, RefreshError

    try:
        yield
    except (DefaultCredentialsError, RefreshError) as error:
        said = str(error).partition("\n")[0].partition(" To set up Application Default Credentials")[0]
        raise CredentialsError(
            f"no access to gs:// paths: {said.strip().rstrip('.')[:300]}. Run: gcloud auth application-default login; "
            f"or use local paths (for a run: {set_options('checkpoint.bucket=')})"
        ) from error


def check_credentials() -> None:
    """Check that this machine has credentials for buckets. It takes up to 12 s if a metadata server does not answer.

    Raises:
        CredentialsError: this machine has no credentials.
    """
    _gcs_client()


@lru_cache(maxsize=1)
def _cached_client(project: str | None, emulator: str | None) -> Any:
    """One client per process, because a new one looks up credentials. The library itself reads `emulator`."""
    from google.cloud.storage import Client

    return Client(project=project)
