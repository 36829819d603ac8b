"""A loopback server for the part of the Google Cloud Storage JSON API that the dependencies use. For tests only.

Objects are in memory, in any bucket. Supported: generations and preconditions (412, 304), ranges, resumable, multipart
and media uploads, listing with prefix, delimiter and offsets, rewrite, copy, compose, delete, batch.
Not supported: authentication, pages of a listing, metadata updates, bucket management.

    with GcsServer() as server:
        server.environment()                        # variables for this process and its children
        server.fail(503, method="GET", times=2)     # the next two reads fail
        server.objects("bucket")                    # {name: bytes}
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from support.gcs_handler import Handler
from support.gcs_types import CUT, HALF, Blob, Key, Upload

__all__ = ["CUT", "HALF", "GcsServer"]


@dataclass
class Fault:
    """A fault in the next `times` requests whose method and path match."""

    status: int
    method: str
    path: re.Pattern[str]
    times: int


class GcsServer:
    """The server, its objects and its faults. It listens on `address`."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.lock = threading.RLock()
        self.blobs: dict[Key, Blob] = {}
        self.uploads: dict[str, Upload] = {}
        self.numbers = itertools.count(1_700_000_000_000_000)
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.bytes_read = 0
        # called before each request is answered; a test can block in it
        self.gate: Callable[[], None] = lambda: None
        self._http = Listener((address, 0), type("BoundHandler", (Handler,), {"gcs": self}))
        self.url = f"http://{address}:{self._http.server_port}"

    def __enter__(self) -> GcsServer:
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self) -> dict[str, str]:
        """Environment variables that direct google-cloud-storage, gcsfs and TensorStore to this server."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            "GOOGLE_CLOUD_PROJECT": "test",
            "NO_GCE_CHECK": "true",
            "GCE_METADATA_ROOT": "127.0.0.1:9",
            "GCE_METADATA_HOST": "127.0.0.1:9",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def fail(self, status: int, *, method: str = ".*", path: str = ".*", times: int = 1) -> None:
        """Answer the next `times` requests that match both patterns with `status`.

        `CUT` closes the connection without an answer, `HALF` after half of the body.
        """
        with self.lock:
            self.faults.append(Fault(status, method, re.compile(path), times))

    def objects(self, bucket: str) -> dict[str, bytes]:
        """The contents of a bucket by name."""
        with self.lock:
            return {name: blob.data for (b, name), blob in sorted(self.blobs.items()) if b == bucket}

    def put(self, bucket: str, name: str, data: bytes) -> None:
        """Write an object, or damage one."""
        with self.lock:
            self.blobs[bucket, name] = Blob(data, next(self.numbers), "application/octet-stream", None)

    def delete(self, bucket: str, name: str) -> None:
        """Delete an object."""
        with self.lock:
            del self.blobs[bucket, name]

    def clear(self) -> None:
        """Delete objects, uploads, faults and the log of requests."""
        with self.lock:
            for container in (self.blobs, self.uploads, self.faults, self.requests):
                container.clear()

    def next_fault(self, method: str, path: str) -> int | None:
        """The status of the fault for this request; None without a fault."""
        with self.lock:
            self.requests.append(f"{method} {unquote(path)}")
            for fault in self.faults:
                if fault.times and re.fullmatch(fault.method, method) and fault.path.search(unquote(path)):
                    fault.times -= 1
                    return fault.status
        return None


class Listener(ThreadingHTTPServer):
    """A listener that ignores disconnected clients."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)
