"""Files of .npz, read and written as streams: arrays in slices, never a pickle, nothing larger than announced.

A file from a stranger is data: its directory and headers are bounded, and an array's shape and dtype must account
for exactly the bytes that are there before any are read. The first read of an array goes over all of it and compares
its CRC-32; later ones take the rows they need. Local and `gs://` files.
"""

import io
import re
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

BLOCK_BYTES = 1 << 20  # of a local file: stays in the processor's cache between reading, checking and copying
MAX_HEADER_BYTES = 4096

_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# by the dtype that numpy reads in a header; it spells a type that it does not know as raw bytes
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
    header: bytes  # of the .npy format, before the values

    @property
    def key(self) -> str:
        """Its name without the suffix: arr_0."""
        return self.entry.name.removesuffix(".npy")

    @property
    def stored(self) -> FileTensor:
        """Where the values lie, if they are not compressed."""
        start = self.entry.start + len(self.header)
        return FileTensor(self.entry.path, self.key, self.shape, self.dtype, start)

    def __str__(self) -> str:
        return f"{self.entry.path}: {self.key}"


class NpzReader:
    """The arrays of any number of files; remembers which of them have passed their CRC."""

    def __init__(self) -> None:
        self._checked: set[archive.Entry] = set()

    def open(self, path: str) -> dict[str, Member]:
        """The arrays of a file by key; their headers are read and compared with the bytes that are there.

        Raises:
            DamagedCheckpoint: the file is no such file, is cut short, or holds a pickle or an unknown dtype.
            UserError: there is no such file.
        """
        try:
            members = [_member(entry) for entry in archive.entries(path)]
        except DamagedArchive as error:
            raise DamagedCheckpoint(f"{path}: not a whole .npz file: {error}") from error
        by_key = {member.key: member for member in members}
        if len(by_key) != len(members):
            raise DamagedCheckpoint(f"{path}: two arrays have the same name")
        return by_key

    def read(self, member: Member, index: Index, out: np.ndarray) -> None:
        """Copy a slice of an array into `out`, which has the slice's shape and the array's dtype.

        Raises:
            DamagedCheckpoint: the bytes are not those that were written.
        """
        if member.entry.compressed or member.fortran or not member.shape:
            out[...] = _whole(member)[index]
            return
        known = member.entry in self._checked
        first, stop, _ = index[0].indices(member.shape[0])
        bounds, crc = (first, stop) if known else (0, member.shape[0]), zlib.crc32(member.header)
        limit = None if files.is_remote(member.entry.path) else BLOCK_BYTES
        for start, block in member.stored.row_blocks(*bounds, limit):
            if not known:
                crc = zlib.crc32(block.reshape(-1).view(np.uint8).data, crc)
            low, high = max(first, start), min(stop, start + len(block))
            if low < high:
                out[low - first : high - first] = block[low - start : high - start][:, *index[1:]]
        if not known:
            _check(member, crc)
        self._checked.add(member.entry)


def _whole(member: Member) -> np.ndarray:
    """All values of an array of any layout."""
    content = np.empty(member.entry.n_bytes, np.uint8)
    at = 0
    try:
        for block in archive.read_blocks(member.entry, BLOCK_BYTES):
            content[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
    except DamagedArchive as error:
        raise DamagedCheckpoint(f"{member}: damaged: {error}") from error
    _check(member, zlib.crc32(content.data))
    values = content[len(member.header) :].view(member.dtype)
    return values.reshape(member.shape, order="F" if member.fortran else "C")


def _check(member: Member, crc: int) -> None:
    if crc != member.entry.crc:
        raise DamagedCheckpoint(f"{member}: damaged: its CRC is {crc:08x}, not {member.entry.crc:08x}")


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
    """Shape, order and dtype of a .npy header, which `head` stands behind then. Only literals are evaluated."""
    try:
        read = _READERS[np.lib.format.read_magic(head)]
        shape, fortran, dtype = read(head, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # noqa: BLE001  (numpy raises all sorts for a damaged header)
        raise DamagedCheckpoint(f"{where}: its header is not one that numpy writes for an array") from error
    if dtype.hasobject:
        raise DamagedCheckpoint(f"{where}: a pickled array (dtype {dtype.str}): expected numbers, not read")
    if dtype not in _DTYPES:
        known = ", ".join(kind.str for kind in _DTYPES)
        raise DamagedCheckpoint(f"{where}: dtype {str(dtype)[:20]!r}: expected one of {known}")
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= MAX_ELEMENTS for size in shape):
        raise DamagedCheckpoint(f"{where}: a shape of {len(shape)} dimensions that cannot be")
    return shape, fortran, _DTYPES[dtype]


class NpzWriter:
    """Writes arrays one after the other as `np.savez` does: arr_0, arr_1, ... uncompressed."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to a file opened for binary writing, which need not be able to seek."""
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True)
        self._count = 0

    def add(self, shape: tuple[int, ...], dtype: np.dtype, blocks: Iterable[np.ndarray]) -> None:
        """Write the next array, whose values in C order are those of `blocks` one after the other."""
        info = zipfile.ZipInfo(f"arr_{self._count}.npy")  # dated 1980: the same arrays give the same file
        self._count += 1
        with self._archive.open(info, "w", force_zip64=True) as member:
            header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(member, header)
            for block in blocks:
                member.write(np.ascontiguousarray(block, dtype).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Write the file's directory; the file itself stays open."""
        self._archive.close()
