"""Tar archives from strangers as a stream of their files.

tarfile believes what a header says: it reads names and attributes whole, one header within another, and skips as many
bytes as a header claims, whether or not there are any. So what it may read for the headers of one member is bounded,
and so are reads behind the end.
"""

import contextlib
import tarfile
from collections.abc import Iterator
from typing import IO, Self, cast

from mesh_transformer.errors import UserError

# Of a member: its own header, and before it others with a path and a link of 4 KiB each.
MAX_HEADER_BYTES = 16 << 10
# the type stubs lack their names
_DAMAGED_HEADERS: tuple[type[tarfile.TarError], ...] = (
    tarfile.InvalidHeaderError,  # type: ignore[attr-defined]
    tarfile.TruncatedHeaderError,  # type: ignore[attr-defined]
)
_STEP_BYTES = 20 * tarfile.BLOCKSIZE  # that tarfile reads at a time


def tar_members(file: IO[bytes], place: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and bytes of each file in an archive, in order; a file can be read until the next one is asked for.

    Args:
        file: the archive, without compression; need not seek.
        place: its name in messages.

    Raises:
        UserError: the archive has a sparse file.
        TarError, ValueError: it is damaged, ends early, or has headers that are too large; see `damage_explained`.
    """
    bounded = _Bounded(file)
    stream = cast(IO[bytes], bounded)  # of which no more than `read` is used
    archive = tarfile.open(  # noqa: SIM115  (it owns nothing)
        fileobj=stream, mode="r|", bufsize=_STEP_BYTES, tarinfo=_Header
    )
    # members ask it, and it does not know
    archive.fileobj.seekable = lambda: False  # type: ignore[attr-defined]
    while (member := archive.next()) is not None:
        # what tarfile keeps of the members behind it would grow with their number
        archive.members = []  # type: ignore[attr-defined]
        archive.pax_headers = {}
        bounded.allow(archive.offset - archive.fileobj.tell() + MAX_HEADER_BYTES)
        if member.issparse():
            raise UserError(f"{place}: {member.name[:200]} is a sparse file: pack it without --sparse")
        data = archive.extractfile(member) if member.isfile() else None
        if data is not None:
            yield member.name, data


@contextlib.contextmanager
def damage_explained(place: str) -> Iterator[None]:
    """What tarfile says of a damaged archive, in `tar_members` and where a member is read, as a UserError."""
    try:
        yield
    except UserError:
        raise
    except (tarfile.TarError, ValueError) as error:  # ValueError: of the numbers of a sparse file
        raise UserError(f"{place}: damaged tar archive: {error}") from error


class _Header(tarfile.TarInfo):
    """A header; tarfile takes a damaged one behind the first member for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except _DAMAGED_HEADERS as error:
            raise tarfile.ReadError(str(error)) from error


class _Bounded:
    """What tarfile reads from: no more than is allowed, and once behind the end."""

    def __init__(self, file: IO[bytes]):
        self._file, self._at_end = file, False
        self.allow(MAX_HEADER_BYTES)

    def allow(self, size: int) -> None:
        """From here on `size` bytes may be read, in steps."""
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
