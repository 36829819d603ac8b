"""Archives: each file in an archive is read by the format of its name. Nothing is written to disk."""

import posixpath
import tarfile
from collections.abc import Callable, Iterator
from typing import IO

from mesh_transformer.data.corpus.formats.base import Bad, Column, InputFormat, Item
from mesh_transformer.data.corpus.tar import damage_explained, tar_entries
from mesh_transformer.data.records.inflate import Account, inflated, without_suffix
from mesh_transformer.errors import BadDataError, listed

Stream = Callable[[IO[bytes], str, Column], Iterator[Item]]


def archive(*formats: InputFormat) -> InputFormat:
    """The format of archives that hold files of `formats`, compressed or not."""
    streams = {format.suffix: format.stream for format in formats if format.stream is not None}

    def stream(file: IO[bytes], place: str, column: Column) -> Iterator[Item]:
        account = Account.of(file)
        with damage_explained(place):
            for member, data in tar_entries(file, place):
                parts = member.name.split("/")
                if not member.isdir() and not parts[-1].startswith("."):
                    # a name may have bytes that are no text
                    name = member.name[:200].encode("utf-8", "replace").decode()
                    yield from _member(member, data, f"{place}: {name}", account, streams, column)

    return InputFormat(".tar", stream)


def _member(
    member: tarfile.TarInfo,
    data: IO[bytes] | None,
    place: str,
    account: Account,
    streams: dict[str, Stream],
    column: Column,
) -> Iterator[Item]:
    stem, compression = without_suffix(member.name)
    stream = streams.get(posixpath.splitext(stem)[1])
    problem = _problem(member, stream is None, list(streams))
    if data is None or stream is None or problem is not None:
        kind, reason = problem or ("no file", "not a file")
        yield Bad.of(BadDataError(place, kind, reason))
        return
    try:
        yield from stream(inflated(data, compression, place, account) if compression else data, place, column)
    except BadDataError as error:
        # damage of the archive itself ends it
        if not error.place.startswith(place):
            raise
        yield Bad.of(error)


def _problem(member: tarfile.TarInfo, unknown: bool, suffixes: list[str]) -> tuple[str, str] | None:
    """Why a member is not read: kind and reason."""
    if member.issym() or member.islnk():
        return "link", f"a link to {member.linkname[:200]}, which is not followed: pack the file itself"
    if not member.isfile():
        return "no file", "neither a file nor a folder: remove it from the archive"
    if member.name.startswith("/") or ".." in member.name.split("/"):
        return "path outside", "its path leads out of the archive's folder: pack it with a relative path without '..'"
    if unknown:
        return "unknown kind", f"unknown file suffix; allowed: {listed(suffixes)}, each also with .gz, .xz or .zst"
    return None
