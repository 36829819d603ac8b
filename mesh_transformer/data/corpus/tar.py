"""Reads the files of untrusted tar archives as a stream.

tarfile trusts headers: it reads names and attributes whole, follows nested headers, and skips as many bytes as a
header claims, also past the end. This module bounds the bytes that tarfile reads for the headers of one member, and
raises when it reads past the end.
"""

import contextlib
import tarfile
from collections.abc import Iterator
from typing import IO, Self, cast

from mesh_transformer.errors import BadDataError, UserError

# of one member: its own header, and headers before it with a path and a link of 4 KiB each
MAX_HEADER_BYTES = 16 << 10
# the type stubs lack these names
_DAMAGED_HEADERS: tuple[type[tarfile.TarError], ...] = (
    tarfile.InvalidHeaderError,  # type: ignore[attr-defined]
    tarfile.TruncatedHeaderError,  # type: ignore[attr-defined]
)
# what tarfile reads at a time
_STEP_BYTES = 20 * tarfile.BLOCKSIZE


def tar_members(file: IO[bytes], place: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file in an archive, in order; the arguments and errors are as in `tar_entries`."""
    for member, data in tar_entries(file, place):
        if data is not None:
            yield member.name, data


def tar_entries(file: IO[bytes], place: str) -> Iterator[tuple[tarfile.TarInfo, IO[bytes] | None]]:
    """Header and content of each entry of an archive, in order; no content where the entry is no file.

    A file can be read until the iterator advances. Links are not followed, and nothing is written to disk.

    Args:
        file: the decompressed archive; it need not be seekable.
        place: its name in messages.

    Raises:
        BadDataError: the archive has a sparse file.
        TarError, ValueError: it is damaged, ends early, or has headers that are too large; see `damage_explained`.
    """
    bounded = _Bounded(file)
    stream = cast(IO[bytes], bounded)  # tarfile calls only its `read`
    archive = tarfile.open(  # noqa: SIM115  (it owns nothing)
        fileobj=stream, mode="r|", bufsize=_STEP_BYTES, tarinfo=_Header
    )
    # members call it, and tarfile's stream has no such method
    archive.fileobj.seekable = lambda: False  # type: ignore[attr-defined]
    while (member := archive.next()) is not None:
        # otherwise tarfile keeps all members it has read
        archive.members = []  # type: ignore[attr-defined]
        archive.pax_headers = {}
        bounded.allow(archive.offset - archive.fileobj.tell() + MAX_HEADER_BYTES)
        if member.issparse():
            raise BadDataError(place, "sparse", f"{member.name[:200]} is a sparse file: pack it without --sparse")
        yield member, archive.extractfile(member) if member.isfile() else None


@contextlib.contextmanager
def damage_explained(place: str) -> Iterator[None]:
    """Turns the errors of a damaged archive, from `tar_members` or from reading a member, into a BadDataError."""
    try:
        yield
    except UserError:
        raise
    except (tarfile.TarError, ValueError) as error:
        # the numbers of a sparse file raise ValueError
        raise BadDataError(place, "damaged", f"damaged tar archive: {error}") from error


class _Header(tarfile.TarInfo):
    """A header that raises if it is damaged. tarfile takes a damaged header after the first member for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except _DAMAGED_HEADERS as error:
            raise tarfile.ReadError(str(error)) from error


class _Bounded:
    """The file that tarfile reads from. Raises beyond the allowed bytes, and at a second read past the end."""

    def __init__(self, file: IO[bytes]):
        self._file, self._at_end = file, False
        self.allow(MAX_HEADER_BYTES)

    def allow(self, size: int) -> None:
        """Allow `size` more bytes from here, rounded up to a step."""
        self._left = size + _STEP_BYTES

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        if self._at_end:
            raise tarfile.ReadError("it ends inside a member")
        self._at_end = not data
        self._left -= len(data)
        if self._left < 0:
            raise tarfile.ReadError(f"a member with more than {MAX_HEADER_BYTES >> 10} KiB of headers")
        return data
