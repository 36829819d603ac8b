"""Reads zip archives from untrusted sources, local or `gs://`, in blocks of bounded size.

The size of the directory is bounded. The declared sizes of a member are checked against the file before a reader
allocates memory for it, and the inflated size is checked against the declared one. Members are stored or deflated;
encrypted members are refused.
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

# a directory takes about 100 bytes per member
MAX_DIRECTORY_BYTES = 1 << 20
# the limit of deflate: 258 bytes from two bits
MAX_INFLATION = 1032
# the flag of a member whose sizes follow its data, in 16 or 24 bytes
DESCRIPTOR = 8
# read for a member's local header; torch may pad it to align the data to a page
LOCAL_BYTES = 8 << 10
# compressed bytes read at a time
DEFLATED_BYTES = 64 << 10

# signature, length of the name, length of the extra field
_HEADER = struct.Struct("<4s22xHH")


class DamagedArchive(Exception):
    """An archive or a member is damaged. The message does not name the file."""


class Entry(NamedTuple):
    """One member of an archive."""

    path: str
    name: str
    # offset of its data in the file
    start: int
    # compressed size
    stored_bytes: int
    # inflated size
    n_bytes: int
    crc: int
    compressed: bool


def entries(path: str, *, at_once: int = 1) -> list[Entry]:
    """The members of an archive, in the order of its directory. Reads the directory and each member's local header.

    Args:
        at_once: number of headers to read concurrently; on gs:// each is one request.

    Raises:
        DamagedArchive: the file is not a zip archive, is truncated or encrypted, or declares impossible sizes.
        UserError: the file does not exist.
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
    """The inflated bytes of a member, in order, in blocks of at most `block_bytes`. The caller compares the CRC.

    Raises:
        DamagedArchive: the inflated size differs from the declared size, or the file is truncated.
    """
    if not entry.compressed:
        for offset in range(0, entry.n_bytes, block_bytes):
            yield _read(entry, offset, min(block_bytes, entry.n_bytes - offset))
        return
    inflater, remaining = zlib.decompressobj(-zlib.MAX_WBITS), entry.n_bytes
    try:
        for offset in range(0, entry.stored_bytes, DEFLATED_BYTES):
            compressed = _read(entry, offset, min(DEFLATED_BYTES, entry.stored_bytes - offset))
            while not inflater.eof and (block := inflater.decompress(compressed, block_bytes)):
                compressed = inflater.unconsumed_tail
                remaining -= len(block)
                if remaining < 0:
                    raise DamagedArchive(f"{entry.name}: inflates to more than its declared {entry.n_bytes} bytes")
                yield block
    except zlib.error as error:
        raise DamagedArchive(f"{entry.name}: {error}") from error
    if remaining or not inflater.eof:
        raise DamagedArchive(f"{entry.name}: {remaining} of {entry.n_bytes} declared bytes are missing")


def _read(entry: Entry, offset: int, length: int) -> bytes:
    content = files.read_range(entry.path, entry.start + offset, length)
    if len(content) != length:
        raise DamagedArchive(f"{entry.name}: the file is truncated")
    return content


def _entry(handle: _Handle, records: list[int], info: zipfile.ZipInfo) -> Entry:
    """A member. Its local header must have the offset and the length that the directory implies.

    Args:
        records: offsets of the local headers of all members and of the directory, ascending.
    """
    where = f"{info.filename[:80]!r}"
    if info.flag_bits & 1:
        raise DamagedArchive(f"{where}: encrypted")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DamagedArchive(f"{where}: unknown compression {info.compress_type}")
    if not 0 <= info.header_offset < records[-1]:
        raise DamagedArchive(f"{where}: its offset in the directory is outside the file")
    local = files.read_range(handle.path, info.header_offset, LOCAL_BYTES)
    if len(local) < _HEADER.size or not local.startswith(b"PK\x03\x04"):
        raise DamagedArchive(f"{where}: no header at its offset in the directory")
    _, name, extra = _HEADER.unpack_from(local)
    length = _HEADER.size + name + extra
    parsed = _HEADER.size + len(info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437"))
    # an extra field: identifier, length, content
    while parsed + 4 <= length <= len(local):
        parsed += 4 + int.from_bytes(local[parsed + 2 : parsed + 4], "little")
    start = info.header_offset + length
    trailing = records[bisect.bisect(records, info.header_offset)] - start - info.compress_size
    if parsed != length or trailing not in ((16, 24) if info.flag_bits & DESCRIPTOR else (0,)):
        raise DamagedArchive(f"{where}: the length of its header does not match its name and extra fields")
    compressed = info.compress_type != zipfile.ZIP_STORED
    limit = info.compress_size * MAX_INFLATION if compressed else info.compress_size
    if info.file_size > limit:
        raise DamagedArchive(
            f"{where}: {info.file_size} bytes declared, {info.compress_size} stored in a file of {handle.size} bytes: "
            "the file is truncated or its sizes are wrong"
        )
    return Entry(handle.path, info.filename, start, info.compress_size, info.file_size, info.CRC, compressed)


class _Handle(io.RawIOBase):
    """A file object for zipfile that reads ranges. It refuses to read more than MAX_DIRECTORY_BYTES at a time."""

    def __init__(self, path: str) -> None:
        self.path, self.size = path, files.size(path)
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise ValueError("an offset is negative")
        self._position = position
        return position

    def read(self, count: int = -1) -> bytes:
        available = max(0, self.size - self._position)
        count = available if count is None or count < 0 else min(count, available)
        if count > MAX_DIRECTORY_BYTES:
            raise zipfile.BadZipFile(f"its directory has {count} bytes, at most {MAX_DIRECTORY_BYTES} are read")
        content = files.read_range(self.path, self._position, count)
        self._position += len(content)
        return content
