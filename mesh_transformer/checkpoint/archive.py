"""Zip archives from strangers, local or `gs://`: what is in them, and its bytes in pieces of bounded size.

The directory is bounded. A member's announced sizes must fit in the file, and what it inflates to must have the
announced size, before a reader makes room for it. Members are stored or deflated, never encrypted.
"""

from __future__ import annotations

import bisect
import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from mesh_transformer import files

MAX_DIRECTORY_BYTES = 1 << 20  # about 100 bytes for each member
MAX_INFLATION = 1032  # deflate cannot do more: 258 bytes for two bits
DESCRIPTOR = 8  # the flag of a member whose sizes follow it, in 16 bytes or in 24
LOCAL_BYTES = 8 << 10  # of a member's own header; torch may align the bytes after it to a page
DEFLATED_BYTES = 64 << 10  # read at a time

_HEADER = struct.Struct("<4s22xHH")  # signature, lengths of name and extra field


class DamagedArchive(Exception):
    """What is wrong with an archive or a member; the message does not name the file."""


class Entry(NamedTuple):
    """One member; `start` is where its bytes begin in the file."""

    path: str
    name: str
    start: int
    stored_bytes: int
    n_bytes: int  # inflated
    crc: int
    compressed: bool


def entries(path: str, *, at_once: int = 1) -> list[Entry]:
    """The members of an archive, in the order of its directory. Of the members only their own headers are read.

    Args:
        at_once: headers read at the same time; on gs:// each is a request.

    Raises:
        DamagedArchive: it is none, is cut short or encrypted, or announces what cannot be.
        UserError: there is no such file.
    """
    handle = _Handle(path)
    try:
        with zipfile.ZipFile(handle) as archive:
            infos = archive.infolist()
            records = sorted([*(info.header_offset for info in infos), archive.start_dir])
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error) as error:
        raise DamagedArchive(str(error)) from error
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(partial(_entry, handle, records), infos))


def read_blocks(entry: Entry, block_bytes: int) -> Iterator[bytes]:
    """The bytes of a member in order, some at a time, inflated. Whoever reads to the end compares the CRC.

    Raises:
        DamagedArchive: it inflates to another size than it announces, or the file ends early.
    """
    if not entry.compressed:
        for at in range(0, entry.n_bytes, block_bytes):
            yield _read(entry, at, min(block_bytes, entry.n_bytes - at))
        return
    inflater, left = zlib.decompressobj(-zlib.MAX_WBITS), entry.n_bytes
    try:
        for at in range(0, entry.stored_bytes, DEFLATED_BYTES):
            waiting = _read(entry, at, min(DEFLATED_BYTES, entry.stored_bytes - at))
            while not inflater.eof and (block := inflater.decompress(waiting, block_bytes)):
                waiting = inflater.unconsumed_tail
                left -= len(block)
                if left < 0:
                    raise DamagedArchive(
                        f"{entry.name}: more than the {entry.n_bytes} bytes that it announces"
                    )
                yield block
    except zlib.error as error:
        raise DamagedArchive(f"{entry.name}: {error}") from error
    if left or not inflater.eof:
        raise DamagedArchive(f"{entry.name}: {left} of {entry.n_bytes} announced bytes are missing")


def _read(entry: Entry, at: int, length: int) -> bytes:
    content = files.read_range(entry.path, entry.start + at, length)
    if len(content) != length:
        raise DamagedArchive(f"{entry.name}: the file ends early")
    return content


def _entry(handle: _Handle, records: list[int], info: zipfile.ZipInfo) -> Entry:
    """A member, whose header lies where it should and is of the length that it should be.

    Args:
        records: where the headers of all members and the directory begin, ascending.
    """
    where = f"{info.filename[:80]!r}"
    if info.flag_bits & 1:
        raise DamagedArchive(f"{where}: encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DamagedArchive(f"{where}: unknown compression {info.compress_type}")
    if not 0 <= info.header_offset < records[-1]:
        raise DamagedArchive(f"{where}: the directory points outside of the file")
    local = files.read_range(handle.path, info.header_offset, LOCAL_BYTES)
    if len(local) < _HEADER.size or not local.startswith(b"PK\x03\x04"):
        raise DamagedArchive(f"{where}: not where the directory says")
    _, name, extra = _HEADER.unpack_from(local)
    length = _HEADER.size + name + extra
    at = _HEADER.size + len(info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"))
    while at + 4 <= length <= len(local):  # the extra fields: identifier, length, content
        at += 4 + int.from_bytes(local[at + 2 : at + 4], "little")
    start = info.header_offset + length
    after = records[bisect.bisect(records, info.header_offset)] - start - info.compress_size
    if at != length or after not in ((16, 24) if info.flag_bits & DESCRIPTOR else (0,)):
        raise DamagedArchive(f"{where}: its header has another length than its name and fields")
    compressed = info.compress_type != zipfile.ZIP_STORED
    most = info.compress_size * MAX_INFLATION if compressed else info.compress_size
    if info.file_size > most:
        raise DamagedArchive(
            f"{where}: {info.file_size} bytes announced, {info.compress_size} stored in a file of {handle.size}: "
            "cut short, or sizes that cannot be"
        )
    return Entry(handle.path, info.filename, start, info.compress_size, info.file_size, info.CRC, compressed)


class _Handle(io.RawIOBase):
    """What zipfile needs of a file, over range reads; refuses a directory of absurd size."""

    def __init__(self, path: str) -> None:
        self.path, self.size = path, files.size(path)
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise ValueError("an offset lies before the file's beginning")
        self._position = position
        return position

    def read(self, count: int = -1) -> bytes:
        left = max(0, self.size - self._position)
        count = left if count is None or count < 0 else min(count, left)
        if count > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"a directory of {count} bytes")
        content = files.read_range(self.path, self._position, count)
        self._position += len(content)
        return content
