"""Decompresses gzip, zlib, xz and Zstandard files, also with several members in a row, as byte streams.

A file that ends early is an error here; zstandard's own reader ends without one. Memory and the total output of all
layers of a file are bounded, so that a small hostile file fills neither memory nor disk; `lzma.LZMAFile` has no memory
limit.
"""

import io
import lzma
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, Literal

import zstandard

from mesh_transformer.errors import BadDataError

Compression = Literal["gzip", "zlib", "xz", "zst"]
SUFFIXES: dict[str, Compression] = {".gz": "gzip", ".xz": "xz", ".zst": "zst"}

_BUFFER_BYTES = 1 << 16
# input of one step: not every decompressor takes an output limit, so that little input bounds the output
_STEP_BYTES = 1 << 10
_XZ_MEMORY_BYTES = 1 << 28
_FREE_BYTES = 1 << 30
# ratio of output to input beyond _FREE_BYTES: deflate cannot reach it, and no text does
_MAX_INFLATION = 1100
_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b\x08", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zst"),
)


def without_suffix(name: str) -> tuple[str, Compression | None]:
    """A file name in small letters without the suffix of its compression, and the compression."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix == ".tgz":
        return f"{stem}.tar", "gzip"
    compression = SUFFIXES.get(suffix)
    return (stem if compression else stem + suffix), compression


def detect(head: bytes) -> Compression | None:
    """The compression that the first bytes of a file show, or None."""
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    is_zlib = len(head) >= 2 and head[0] & 0x0F == 8 and head[0] >> 4 <= 7 and (head[0] << 8 | head[1]) % 31 == 0
    return "zlib" if is_zlib else None


@dataclass
class Account:
    """The bytes of an input file, and the bytes that they became, in all of its layers and members together.

    Args:
        is_inflated: whether a layer counts what it reads of the file: then the layers inside of it read its output.
    """

    is_inflated: bool
    bytes_in: int = 0
    bytes_out: int = 0

    @classmethod
    def of(cls, file: IO[bytes]) -> "Account":
        """The account of an archive that is read from `file`, which `inflated` may have returned."""
        layer = getattr(file, "raw", None)
        return layer.account if isinstance(layer, Inflated) else cls(is_inflated=False)

    def check(self, path: str) -> None:
        """Refuse a file whose bytes have become so many.

        Raises:
            BadDataError: no text or record file expands like this.
        """
        if self.bytes_out > max(_FREE_BYTES, _MAX_INFLATION * self.bytes_in):
            raise BadDataError(
                path,
                "expands too much",
                f"{self.bytes_in} bytes expand to {self.bytes_out} and more, which no text or record file does: it is "
                "damaged or hostile",
            )


class Inflated(io.RawIOBase):
    """The decompressed bytes of `file`, readable from start to end.

    Args:
        account: of the archive that `file` is a member of; None if it is a file of its own.

    Raises (from `read`):
        BadDataError: the compressed data is damaged or ends early, or so little data expands to so much.
    """

    def __init__(self, file: IO[bytes], kind: Compression, path: str, account: Account | None):
        self._file, self._kind, self._path = file, kind, path
        self._counts_input = account is None or not account.is_inflated
        self.account = Account(is_inflated=True) if account is None else account
        self._decoder: Any = None
        self._output = memoryview(b"")
        self._at_end = False

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        while not self._output and not self._at_end:
            try:
                self._output = memoryview(self._step())
            except (zlib.error, lzma.LZMAError, zstandard.ZstdError, EOFError) as error:
                raise BadDataError(self._path, "damaged", f"damaged {self._kind} data: {error}") from error
            self.account.bytes_out += len(self._output)
        self.account.check(self._path)
        n = min(len(view), len(self._output))
        view[:n] = self._output[:n]
        self._output = self._output[n:]
        return n

    def _step(self) -> bytes:
        """The next decompressed bytes, perhaps none. Sets `_at_end` after the last member."""
        data = b""
        if self._decoder is not None and self._decoder.eof:
            data, self._decoder = self._decoder.unused_data, None
        if not data:
            data = self._file.read(_STEP_BYTES)
            if self._counts_input:
                self.account.bytes_in += len(data)
            if not data and self._decoder is not None:
                raise EOFError("the file ends early (cut short while copying?)")
            self._at_end = not data
        if self._decoder is None:
            # zeros pad the space between members
            data = data.lstrip(b"\0")
            self._decoder = _DECODERS[self._kind]() if data else None
        return self._decoder.decompress(data) if data else b""


_DECODERS: dict[Compression, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(31),
    "zlib": lambda: zlib.decompressobj(15),
    "xz": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES),
    "zst": lambda: zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj(),
}


def inflated(file: IO[bytes], kind: Compression, path: str, account: Account | None = None) -> IO[bytes]:
    """A buffered reader of the decompressed bytes of `file`; closing it closes `file`. Arguments as in `Inflated`."""
    return io.BufferedReader(Inflated(file, kind, path, account), _BUFFER_BYTES)
