"""Documents out of text, JSON-lines and tar files, compressed or not, a bounded piece at a time."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import IO, Any, NamedTuple

from mesh_transformer.data.inflate import Compression, inflated
from mesh_transformer.errors import UserError
from mesh_transformer.files import is_remote, open_binary

PIECE_CHARS = 1 << 17
MAX_LINE_BYTES = 256 << 20
_HARD_CUT_CHARS = 8 * PIECE_CHARS
_KINDS = (".txt", ".jsonl", ".tar")
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".xz": "xz", ".zst": "zst"}
_ACCEPTED = ".txt, .jsonl, .tar, each also with .gz, .xz or .zst behind it, .tgz, or a plain .xz"
# Behind a letter or digit, white space begins something new in every byte-level tokenizer.
_NEW_LINE = re.compile(r"(?<=[^\W_])\n")
_NEW_WORD = re.compile(r"(?<=[^\W_])[ \n]")


class Piece(NamedTuple):
    """A part of a document; `ends` in its last."""

    text: str
    ends: bool


def input_files(path: str) -> list[str]:
    """The input files behind `path`: itself, or those in the folder and the folders in it, sorted.

    Raises:
        UserError: there is none, or a file is of a kind that is not read.
    """
    if is_remote(path) or os.path.isfile(path):
        if _kind(path)[0] is None:
            raise UserError(f"{path}: not a kind of file that is read; these are: {_ACCEPTED}")
        return [path]
    if not os.path.isdir(path):
        raise UserError(f"no such file or folder: {path}")
    found = sorted(os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    files = [f for f in found if _kind(f)[0] is not None and not os.path.basename(f).startswith(".")]
    if not files:
        raise UserError(f"{path}: no input file in this folder; these are read: {_ACCEPTED}")
    return files


def file_pieces(path: str, separator: str | None) -> Iterator[Piece]:
    """The documents of one file; `separator` in a text ends a document.

    Raises:
        UserError: the file is missing, damaged, no UTF-8, or a line is no JSON; names the file and the line.
    """
    with open_binary(path) as file:
        yield from _pieces_of(file, path, os.path.basename(path), separator)


def _kind(name: str) -> tuple[str | None, Compression | None]:
    """(.txt | .jsonl | .tar | '' for a compressed file that must be looked into | None, compression)."""
    if name.endswith(".tgz"):
        return ".tar", "gzip"
    stem, suffix = os.path.splitext(name)
    compression = _COMPRESSIONS.get(suffix)
    inner = os.path.splitext(stem)[1] if compression else suffix
    if inner in _KINDS:
        return inner, compression
    return ("" if compression == "xz" else None), compression


def _pieces_of(file: IO[bytes], place: str, name: str, separator: str | None) -> Iterator[Piece]:
    kind, compression = _kind(name)
    if compression is not None:
        file = inflated(file, compression, place)
    if kind == "":
        head = file.peek(512) if isinstance(file, io.BufferedReader) else b""
        kind = ".tar" if head[257:262] == b"ustar" else ".txt"
    if kind == ".tar":
        yield from _tar_pieces(file, place, separator)
    elif kind == ".jsonl":
        for text in _json_texts(file, place):
            yield from cut([text], separator)
    else:
        yield from cut(_text_blocks(file, place), separator)


def _tar_pieces(file: IO[bytes], place: str, separator: str | None) -> Iterator[Piece]:
    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                data = archive.extractfile(member) if member.isfile() else None
                if data is not None and _kind(member.name)[0] in (".txt", ".jsonl"):
                    stream = io.BufferedReader(_Member(data))
                    yield from _pieces_of(stream, f"{place}: {member.name}", member.name, separator)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{place}: damaged tar archive: {error}") from error


class _Member(io.RawIOBase):
    """A member of a tar stream; what tarfile hands out cannot be asked whether it seeks."""

    def __init__(self, data: IO[bytes]):
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        data = self._data.read(len(target))
        target[: len(data)] = data
        return len(data)


def _text_blocks(file: IO[bytes], place: str) -> Iterator[str]:
    text = io.TextIOWrapper(file, encoding="utf-8")
    line = 1
    while True:
        try:
            block = text.read(PIECE_CHARS)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{place}: not UTF-8 text ({error.reason}, in line {line} or after it)"
            ) from error
        if not block:
            return
        line += block.count("\n")
        yield block


def _json_texts(file: IO[bytes], place: str) -> Iterator[str]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{place}, line {number}: longer than {MAX_LINE_BYTES} bytes")
        if line.strip():
            yield _json_text(line, f"{place}, line {number}")


def _json_text(line: bytes, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from error
    text = value.get("text") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise UserError(f'{place}: neither {{"text": "..."}} nor a string')
    return text


def cut(blocks: Iterable[str], separator: str | None) -> Iterator[Piece]:
    """The pieces of one text that arrives in blocks; a long document is cut where tokens cannot span the cut."""
    rest = ""
    for block in blocks:
        rest += block
        if separator:
            *whole, rest = rest.split(separator)
            for document in whole:
                yield from _shorten(document)
        while (at := _cut_place(rest)) is not None:
            yield Piece(rest[:at], False)
            rest = rest[at:]
    yield from _shorten(rest)


def _shorten(document: str) -> Iterator[Piece]:
    while (at := _cut_place(document)) is not None:
        yield Piece(document[:at], False)
        document = document[at:]
    yield Piece(document, True)


def _cut_place(text: str) -> int | None:
    if len(text) <= 2 * PIECE_CHARS:
        return None
    for pattern in (_NEW_LINE, _NEW_WORD):
        if match := pattern.search(text, PIECE_CHARS, 2 * PIECE_CHARS):
            return match.start()
    return PIECE_CHARS if len(text) > _HARD_CUT_CHARS else None
