"""Reads input files that are local, on gs:// or on the Hugging Face hub, with few requests.

A task needs one range of a file. On gs:// it downloads the range with one request to a temporary file. A file of the
hub is downloaded whole to the hub's cache, where other tasks of the same machine find it.
"""

import io
import os
import tempfile
from typing import IO, Any

from mesh_transformer import files, hub
from mesh_transformer.errors import UserError

_BUFFER_BYTES = 1 << 20


def open_file(path: str, size: int) -> IO[bytes]:
    """A file for reading a little of it, such as its first or last bytes. It can seek.

    Args:
        size: of the file, bytes.

    Raises:
        UserError: the file does not exist, or may not be read.
    """
    if files.is_remote(path) or hub.is_dataset(path):
        return io.BufferedReader(RangeFile(path, size), 1 << 16)
    return _open_local(path)


def open_range(path: str, size: int, start: int = 0, stop: int | None = None) -> IO[bytes]:
    """A file for reading most of the bytes `start` to `stop`, at byte `start`. It can seek to any place.

    Args:
        size: of the file, bytes. To ask a bucket for it would be one more request.
        stop: None: the end of the file.

    Raises:
        UserError: the file does not exist, or may not be read.
    """
    if not files.is_remote(path):
        file = _open_local(hub.dataset_file(path) if hub.is_dataset(path) else path)
        file.seek(start)
        return file
    remote = RangeFile(path, size)
    remote.hold(start, size if stop is None else min(stop, size))
    buffered = io.BufferedReader(remote, _BUFFER_BYTES)
    buffered.seek(start)
    return buffered


def _open_local(path: str) -> IO[bytes]:
    try:
        return files.open_binary(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


class RangeFile(io.RawIOBase):
    """A file on gs:// or on the hub. A temporary file may hold one range of it.

    A read outside the range is a request. Where `ahead` is not 0, it downloads so many bytes of an object from there
    as the new range.

    Args:
        size: of the file, bytes.
    """

    def __init__(self, path: str, size: int):
        self.size, self.ahead = size, 0
        self._path, self._at = path, 0
        self._held: IO[bytes] | None = None
        self._start = self._stop = 0

    def hold(self, start: int, stop: int) -> None:
        """Download the bytes `start` to `stop` of an object."""
        self._release()
        self._held = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        files.download(self._path, start, stop, self._held)
        self._start, self._stop = start, start + self._held.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence])
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")[: max(0, self.size - self._at)]
        done = 0
        # Parquet's reader takes fewer bytes than it asked for as the end of the file
        while done < len(view) and (data := self._some(len(view) - done)):
            view[done : done + len(data)] = data
            done += len(data)
            self._at += len(data)
        return done

    def _some(self, length: int) -> bytes:
        """At least one and at most `length` of the next bytes; none at the end of the file."""
        if self.ahead and not self._start <= self._at < self._stop:
            self.hold(self._at, min(self._at + self.ahead, self.size))
        if self._held is not None and self._start <= self._at < self._stop:
            self._held.seek(self._at - self._start)
            return self._held.read(min(length, self._stop - self._at))
        read = hub.read_dataset_range if hub.is_dataset(self._path) else files.read_range
        return read(self._path, self._at, length)

    def close(self) -> None:
        self._release()
        super().close()

    def _release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None
