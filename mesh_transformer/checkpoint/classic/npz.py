"""Reads and writes .npz files, local or `gs://`, as streams: arrays in slices, no pickles, sizes checked in advance.

A file comes from an untrusted source: the sizes of its directory and headers are bounded, and the shape and dtype of an
array must match its size in the file before the array is read. The first read of an array reads all of it and compares
its CRC-32; later reads take only the rows they need.
"""

import io
import re
import threading
import zipfile
import zlib
from collections.abc import Iterable
from typing import IO, NamedTuple

import ml_dtypes
import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint import archive
from mesh_transformer.checkpoint.archive import DamagedArchive
from mesh_transformer.checkpoint.tensors import (
    MAX_DIMENSIONS,
    MAX_ELEMENTS,
    DamagedCheckpoint,
    FileTensor,
    Index,
)

# read at a time from a local file: fits the processor's cache while the block is read, checked and copied
BLOCK_BYTES = 1 << 20
MAX_HEADER_BYTES = 4096

# numpy reads a header with ast.parse, which fails at times when two threads of Python 3.11 call it together: "AST
# constructor recursion depth mismatch" (CPython issue 106905)
_PARSING = threading.Lock()
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# by the dtype that numpy reads in a header; numpy writes bfloat16, which it does not know, as raw bytes
_DTYPES = {
    **{np.dtype(name): np.dtype(name) for name in ("<f4", "<f2", "<i4")},
    np.dtype("V2"): np.dtype(ml_dtypes.bfloat16),
}


class Member(NamedTuple):
    """One array of a file."""

    entry: archive.Entry
    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    # the .npy header before the values
    header: bytes

    @property
    def key(self) -> str:
        """The name without the suffix, such as arr_0."""
        return self.entry.name.removesuffix(".npy")

    @property
    def stored(self) -> FileTensor:
        """The values in the file, if they are not compressed."""
        start = self.entry.start + len(self.header)
        return FileTensor(self.entry.path, self.key, self.shape, self.dtype, start)

    def __str__(self) -> str:
        return f"{self.entry.path}: {self.key}"


class NpzReader:
    """Reads the arrays of any number of files, and remembers which arrays have passed the CRC check."""

    def __init__(self) -> None:
        self._checked: set[archive.Entry] = set()

    def open(self, path: str) -> dict[str, Member]:
        """The arrays of a file by key. Reads the headers and checks them against the sizes in the file.

        Raises:
            DamagedCheckpoint: the file is not an .npz file, is truncated, or holds a pickle or an unknown dtype.
            UserError: the file does not exist.
        """
        try:
            members = [_member(entry) for entry in archive.entries(path)]
        except DamagedArchive as error:
            raise DamagedCheckpoint(f"{path}: not a complete .npz file: {error}") from error
        by_key = {member.key: member for member in members}
        if len(by_key) != len(members):
            raise DamagedCheckpoint(f"{path}: two arrays have the same name")
        return by_key

    def read(self, member: Member, index: Index, out: np.ndarray) -> None:
        """Copy a slice of an array into `out`, which has the slice's shape and the array's dtype.

        Raises:
            DamagedCheckpoint: the bytes are damaged.
        """
        if member.entry.compressed or member.fortran or not member.shape:
            out[...] = _whole(member)[index]
            return
        checked = member.entry in self._checked
        first, stop, _ = index[0].indices(member.shape[0])
        bounds, crc = (first, stop) if checked else (0, member.shape[0]), zlib.crc32(member.header)
        limit = None if files.is_remote(member.entry.path) else BLOCK_BYTES
        for start, block in member.stored.row_blocks(*bounds, limit):
            if not checked:
                crc = zlib.crc32(block.reshape(-1).view(np.uint8).data, crc)
            low, high = max(first, start), min(stop, start + len(block))
            if low < high:
                out[low - first : high - first] = block[low - start : high - start][:, *index[1:]]
        if not checked:
            _check(member, crc)
        self._checked.add(member.entry)


def _whole(member: Member) -> np.ndarray:
    """All values of an array in C or Fortran order, stored or compressed."""
    content = np.empty(member.entry.n_bytes, np.uint8)
    offset = 0
    try:
        for block in archive.read_blocks(member.entry, BLOCK_BYTES):
            content[offset : offset + len(block)] = np.frombuffer(block, np.uint8)
            offset += len(block)
    except DamagedArchive as error:
        raise DamagedCheckpoint(f"{member}: damaged: {error}") from error
    _check(member, zlib.crc32(content.data))
    values = content[len(member.header) :].view(member.dtype)
    return values.reshape(member.shape, order="F" if member.fortran else "C")


def _check(member: Member, crc: int) -> None:
    if crc != member.entry.crc:
        raise DamagedCheckpoint(f"{member}: damaged: expected CRC {member.entry.crc:08x}, found {crc:08x}")


def _member(entry: archive.Entry) -> Member:
    where = f"{entry.path}: {entry.name[:80]!r}"
    if not re.fullmatch(r"arr_\d{1,6}\.npy", entry.name):
        raise DamagedCheckpoint(f"{where}: expected arrays named arr_0, arr_1, ...")
    head = io.BytesIO(next(archive.read_blocks(entry, MAX_HEADER_BYTES), b""))
    shape, fortran, dtype = _parse_header(where, head)
    member = Member(entry, shape, dtype, fortran, head.getvalue()[: head.tell()])
    expected, found = member.stored.n_bytes, entry.n_bytes - len(member.header)
    if found != expected:
        raise DamagedCheckpoint(f"{where}: {shape} {dtype} takes {expected} bytes, found {found}")
    return member


def _parse_header(where: str, head: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Parse a .npy header: shape, whether in Fortran order, dtype. `head` is then positioned after it."""
    try:
        read = _READERS[np.lib.format.read_magic(head)]
        with _PARSING:
            shape, fortran, dtype = read(head, max_header_size=MAX_HEADER_BYTES)
    # numpy raises many types of exceptions for a damaged header
    except Exception as error:  # noqa: BLE001
        raise DamagedCheckpoint(f"{where}: its header is not a .npy header") from error
    if dtype.hasobject:
        raise DamagedCheckpoint(f"{where}: a pickled array (dtype {dtype.str}) is not read: expected numbers")
    if dtype not in _DTYPES:
        known = ", ".join(kind.str for kind in _DTYPES)
        raise DamagedCheckpoint(f"{where}: dtype {str(dtype)[:20]!r}: expected one of {known}")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= MAX_ELEMENTS for size in shape):
        raise DamagedCheckpoint(
            f"{where}: its shape has more than {MAX_DIMENSIONS} dimensions or {MAX_ELEMENTS} elements per dimension"
        )
    return shape, fortran, _DTYPES[dtype]


class NpzWriter:
    """Writes arrays as `np.savez` does: arr_0, arr_1, ..., uncompressed."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to a binary file, which need not be seekable."""
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._count = 0

    def add(self, shape: tuple[int, ...], dtype: np.dtype, blocks: Iterable[np.ndarray]) -> None:
        """Write the next array; `blocks` are consecutive parts of its values in C order."""
        # ZipInfo sets the date to 1980, so the same arrays give the same file
        info = zipfile.ZipInfo(f"arr_{self._count}.npy")
        self._count += 1
        with self._archive.open(info, "w", force_zip64=True) as member:
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for block in blocks:
                member.write(np.ascontiguousarray(block, dtype).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Write the directory of the archive. The file stays open."""
        self._archive.close()
