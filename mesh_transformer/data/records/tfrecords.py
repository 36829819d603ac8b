"""TFRecord files: length (u64), checksum of the length, data, checksum of the data; little-endian, masked crc32c.

A whole file may be compressed (gzip or zlib). The content decides, not the name: a file whose first twelve bytes are a
valid record header is plain. Offsets count decompressed bytes.
"""

import contextlib
import io
import os
import struct
from collections.abc import Iterable
from typing import IO, NamedTuple, Self

import google_crc32c
import numpy as np

from mesh_transformer.data.records.example import MAX_NUMBERS, decode_example, encode_example
from mesh_transformer.data.records.inflate import detect, inflated
from mesh_transformer.errors import UserError
from mesh_transformer.files import is_remote, open_binary
from mesh_transformer.sequences import Example

MAX_RECORD_BYTES = 64 << 20
# bytes of a record beside its data
FRAME_BYTES = 16
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_SKIP_BYTES = 1 << 20


class Record(NamedTuple):
    """One record: its bytes, and its file, number and offset."""

    path: str
    number: int
    offset: int
    data: bytes

    @property
    def place(self) -> str:
        """Where the record is, for a message."""
        return _place(self.path, self.number, self.offset)

    def example(self, most: int = MAX_NUMBERS) -> Example:
        """The content of the record. `most`: numbers that it may hold.

        Raises:
            UserError: the record holds no tokens, or too many numbers; names the file, the record and its offset.
        """
        try:
            return decode_example(self.data, most)
        except UserError as error:
            raise UserError(f"{self.place}: {error}") from error


class RecordReader:
    """Reads or skips one record at a time. `number` and `offset` belong to the next record.

    A start at an offset costs one seek in a plain file; a compressed file is read up to the offset.

    Raises (from every method):
        UserError: the file is missing, cut short or damaged; names the file, the record and its offset.
    """

    def __init__(self, path: str, number: int = 0, offset: int = 0):
        self.path, self.number, self.offset = path, number, offset
        self._file, self._size = _open(path)
        try:
            if self._size is not None and offset > self._size:
                raise self._damaged(f"the file has only {self._size} bytes")
            self._skip(offset)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    @property
    def plain(self) -> bool:
        """Whether the file is not compressed."""
        return self._size is not None

    def read(self, keep: bool = True) -> Record | None:
        """The next record, its checksums verified; None at the end of the file.

        Without `keep` the record is skipped: its data is empty and not verified.
        """
        length = self._length()
        if length is None:
            return None
        if not keep:
            self._skip(length)
        data = self._exactly(length) if keep else b""
        checksum = self._exactly(_CHECKSUM.size)
        if keep and checksum != _checksum(data):
            raise self._damaged("the checksum of its data does not match")
        record = Record(self.path, self.number, self.offset, data)
        self.number += 1
        self.offset += _HEADER.size + length + _CHECKSUM.size
        return record

    def _length(self) -> int | None:
        header = self._read(_HEADER.size)
        if not header:
            return None
        if len(header) < _HEADER.size:
            raise self._damaged("the file ends inside it")
        length, _ = _HEADER.unpack(header)
        if not _is_header(header):
            raise self._damaged("the checksum of its length does not match")
        if length > MAX_RECORD_BYTES:
            raise self._damaged(f"it claims {length} bytes, at most {MAX_RECORD_BYTES} are allowed")
        if self._size is not None and self.offset + _HEADER.size + length + _CHECKSUM.size > self._size:
            raise self._damaged("the file ends inside it")
        return length

    def _exactly(self, n: int) -> bytes:
        data = self._read(n)
        if len(data) < n:
            raise self._damaged("the file ends inside it")
        return data

    def _read(self, n: int) -> bytes:
        try:
            return self._file.read(n)
        except UserError as error:
            # of the decompressor
            raise self._damaged(str(error).removeprefix(f"{self.path}: ")) from error

    def _skip(self, n: int) -> None:
        if self._size is not None:
            self._file.seek(n, os.SEEK_CUR)
            return
        while n > 0:
            n -= len(self._exactly(min(n, _SKIP_BYTES)))

    def _damaged(self, why: str) -> UserError:
        return _damaged(self.path, self.number, self.offset, why)


def parse_record(path: str, number: int, offset: int, content: bytes) -> Record:
    """The record whose bytes in the file are `content`, its checksums verified.

    Raises:
        UserError: the bytes are not one record; names the file, the record and its offset.
    """
    header, data, checksum = (
        content[: _HEADER.size],
        content[_HEADER.size : -_CHECKSUM.size],
        content[-_CHECKSUM.size :],
    )
    if len(content) < FRAME_BYTES or not _is_header(header):
        raise _damaged(path, number, offset, "the checksum of its length does not match")
    if (length := _HEADER.unpack(header)[0]) != len(data):
        raise _damaged(path, number, offset, f"it claims {length} bytes and has {len(data)}")
    if checksum != _checksum(data):
        raise _damaged(path, number, offset, "the checksum of its data does not match")
    return Record(path, number, offset, data)


def write_record(
    file: IO[bytes], tokens: np.ndarray, documents: np.ndarray | None = None, loss: np.ndarray | None = None
) -> None:
    """Append one record to `file`. The arguments are the fields of `Example`."""
    data = encode_example(tokens, documents, loss)
    header = struct.pack("<Q", len(data))
    file.write(b"".join((header, _checksum(header), data, _checksum(data))))


def write_records(path: str, sequences: Iterable[np.ndarray]) -> int:
    """Write a plain record file (local or `gs://`). Returns the number of records."""
    count = 0
    with open_binary(path, "wb") as file:
        for tokens in sequences:
            write_record(file, tokens)
            count += 1
    return count


def masked_crc32c(data: bytes) -> int:
    """The checksum of the format: crc32c rotated right by 15 bits plus a constant, modulo 2**32."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    return _CHECKSUM.pack(masked_crc32c(data))


def _damaged(path: str, number: int, offset: int, why: str) -> UserError:
    return UserError(
        f"{_place(path, number, offset)}: {why}; download or make the file again, or remove it from the index"
    )


def _place(path: str, number: int, offset: int) -> str:
    return f"{path}: record {number} at byte {offset}"


def _open(path: str) -> tuple[IO[bytes], int | None]:
    """The decompressed file, and its size in bytes if it is not compressed and can seek."""
    if not is_remote(path) and os.path.isdir(path):
        raise UserError(f"{path} is a folder, not a record file")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(open_binary(path))
        head = file.read(_HEADER.size)
        kind = None if _is_header(head) else detect(head)
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        stack.pop_all()
    if kind is None:
        return file, size
    return inflated(file, kind, path), None


def _is_header(head: bytes) -> bool:
    return head[8:] == _checksum(head[:8])
