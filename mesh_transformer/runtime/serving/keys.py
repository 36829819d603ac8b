"""The API keys of the server, in a file that may change while it runs."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import time
from collections.abc import Sequence
from typing import Self

from mesh_transformer.errors import UserError, plural
from mesh_transformer.logs import log

_MAX_KEY_FILE_BYTES = 1 << 16
# between two looks at the file
_LOOK_EVERY_S = 1.0


class ApiKeys:
    """The keys that requests may send.

    Args:
        keys: empty: requests need no key.
        path: the file with the keys. It is read again when its time or size changes. While it cannot be read, the
            former keys hold.
    """

    def __init__(self, keys: Sequence[bytes] = (), path: str | None = None):
        self.required = bool(keys)
        self._digests, self._path = [_digest(key) for key in keys], path
        self._stamp = None if path is None else _stamp(path)
        self._looked_at = time.monotonic()

    @classmethod
    def of_file(cls, path: str) -> Self:
        """The keys in a file, one per line.

        Raises:
            UserError: the file cannot be read, has no key, or has a key with characters that a header cannot contain.
        """
        return cls(_read(path), path)

    def accepts(self, key: bytes) -> bool:
        """Whether `key` is one of them. All are compared, in constant time."""
        if self._path is not None and time.monotonic() - self._looked_at >= _LOOK_EVERY_S:
            self._look(self._path)
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return any(matches)

    def _look(self, path: str) -> None:
        self._looked_at, stamp = time.monotonic(), _stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._digests = [_digest(key) for key in _read(path)]
            many = plural(len(self._digests), "key holds", "keys hold")
            log.info("--api-key-file %s has changed: %s now", path, many)
        except UserError as error:
            log.warning("%s: the former keys hold", error)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _stamp(path: str) -> tuple[int, int] | None:
    """Time and size of a file; None if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _read(path: str) -> list[bytes]:
    """The API keys in a file, one per line.

    Raises:
        UserError: the file cannot be read, has no key, or has a key with characters that a header cannot contain.
    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_KEY_FILE_BYTES + 1)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise UserError(f"--api-key-file {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_KEY_FILE_BYTES:
        raise UserError(f"--api-key-file {path} is larger than {_MAX_KEY_FILE_BYTES} bytes: write one key per line")
    keys = [line.strip() for line in content.splitlines() if line.strip()]
    if not keys:
        raise UserError(f"--api-key-file {path} is empty: write one key per line")
    for number, key in enumerate(keys, 1):
        if any(not 33 <= byte <= 126 for byte in key):
            reason = "contains a space or a character outside ASCII, so no client can send it: use another key"
            raise UserError(f"--api-key-file {path}: key {number} {reason}")
    if mode & stat.S_IROTH:
        log.warning("all users of this machine can read --api-key-file %s: run chmod 600 on it", path)
    return keys
