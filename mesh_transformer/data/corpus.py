"""Reads documents from text, JSON-lines and tar files, compressed or not, in pieces of bounded size."""

import io
import json
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator
from typing import IO, NamedTuple

from mesh_transformer.data.inflate import Compression, inflated
from mesh_transformer.data.tar import damage_explained, tar_members
from mesh_transformer.errors import UserError, plural
from mesh_transformer.files import is_remote, open_binary, seen_from

_log = logging.getLogger(__name__)

PIECE_CHARS = 1 << 17
# of a JSON line: a text of some ten thousand pages
MAX_LINE_BYTES = 64 << 20
# of a JSON line, outside its strings: lists and objects take 31 times their bytes in memory
MAX_OUTSIDE_BYTES = 4 << 20
# skipped files that a warning names
_NAMED = 3
_HARD_CUT_CHARS = 8 * PIECE_CHARS
_KINDS = (".txt", ".jsonl", ".tar")
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".xz": "xz", ".zst": "zst"}
_ACCEPTED = ".txt, .jsonl, .tar, each also with .gz, .xz or .zst appended, .tgz, or a plain .xz"
# After a letter or digit, white space starts a new token in every byte-level tokenizer.
_NEW_LINE = re.compile(r"(?<=[^\W_])\n")
_NEW_WORD = re.compile(r"(?<=[^\W_])[ \n]")
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class Piece(NamedTuple):
    """A part of a document. `ends`: it is the last part. `null`: the JSON line has null for its text."""

    text: str
    ends: bool
    null: bool = False


def input_files(path: str) -> list[str]:
    """The input files of `path`, sorted: the file itself, or all files under the folder that are not hidden.

    A warning names the files in the folder that have other suffixes.

    Raises:
        UserError: there is no input file, or the file has another suffix.
    """
    if is_remote(path) or os.path.isfile(path):
        if _kind(path)[0] is None:
            raise UserError(f"{path}: unknown file suffix; allowed: {_ACCEPTED}")
        return [path]
    if not os.path.isdir(path):
        raise UserError(f"no such file or folder: {path}{seen_from(path)}")
    named = ((folder, name) for folder, _, names in os.walk(path) for name in names)
    found = sorted(os.path.join(folder, name) for folder, name in named if not name.startswith("."))
    files = [file for file in found if _kind(file)[0] is not None]
    if not files:
        raise UserError(f"{path}: no input file in this folder; allowed: {_ACCEPTED}")
    skipped = [os.path.relpath(file, path) for file in found if _kind(file)[0] is None]
    _warn_skipped(path, skipped[:_NAMED], len(skipped))
    return files


def file_pieces(path: str, separator: str | None) -> Iterator[Piece]:
    """The documents of one file, in pieces. A `separator` in a text ends a document.

    Raises:
        UserError: the file is missing, damaged or not UTF-8, or a line is not JSON; names the file and the line.
    """
    with open_binary(path) as file:
        yield from _pieces_of(file, path, os.path.basename(path), separator)


def _kind(name: str) -> tuple[str | None, Compression | None]:
    """(.txt | .jsonl | .tar | '' where only the decompressed content decides | None, compression)."""
    name = name.lower()
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
            yield from cut([text], separator) if text is not None else [Piece("", True, null=True)]
    else:
        yield from cut(_text_blocks(file, place), separator)


def _tar_pieces(file: IO[bytes], place: str, separator: str | None) -> Iterator[Piece]:
    skipped, first = 0, list[str]()
    with damage_explained(place):
        for name, data in tar_members(file, place):
            if os.path.basename(name).startswith("."):
                continue
            if _kind(name)[0] in (".txt", ".jsonl"):
                yield from _pieces_of(data, f"{place}: {name}", name, separator)
            else:
                skipped += 1
                first += [name] if skipped <= _NAMED else []
    _warn_skipped(place, first, skipped)


def _warn_skipped(place: str, first: list[str], count: int) -> None:
    """Warn of skipped files: how many, and the names of the first."""
    if count:
        some = ", ".join(name[:100] for name in first) + (", ..." if count > _NAMED else "")
        _log.warning("%s: skipped %s (%s); allowed: %s", place, plural(count, "file"), some, _ACCEPTED)


def _text_blocks(file: IO[bytes], place: str) -> Iterator[str]:
    with io.TextIOWrapper(file, encoding="utf-8") as text:
        line = 1
        while True:
            try:
                block = text.read(PIECE_CHARS)
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: not UTF-8 text ({error.reason}, in line {line} or after it)") from error
            if not block:
                return
            line += block.count("\n")
            yield block


def _json_texts(file: IO[bytes], place: str) -> Iterator[str | None]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{place}, line {number}: longer than {MAX_LINE_BYTES} bytes: split it into documents")
        if _has_too_much_outside(line):
            raise UserError(
                f"{place}, line {number}: more than {MAX_OUTSIDE_BYTES} bytes outside strings: remove fields other "
                "than text"
            )
        if line.strip():
            yield _json_text(line, f"{place}, line {number}")


def _has_too_much_outside(line: bytes) -> bool:
    """Whether a JSON line has more than MAX_OUTSIDE_BYTES outside its strings. A string counts as one byte."""
    if len(line) <= MAX_OUTSIDE_BYTES:
        return False
    outside = end = 0
    for string in _JSON_STRING.finditer(line):
        outside += string.start() - end + 1
        end = string.end()
        if outside > MAX_OUTSIDE_BYTES:
            return True
    return outside + len(line) - end > MAX_OUTSIDE_BYTES


def _json_text(line: bytes, place: str) -> str | None:
    """The text of a line; None if it is null. A list of paragraphs is joined by empty lines, as the original does."""
    try:
        # json.loads accepts bytes in UTF-16 too, where `_has_too_much_outside` finds no strings
        value = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: not JSON ({error})") from error
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and "text" in value:
        text = value["text"]
        if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
            return "\n\n".join(text)
        if text is None or isinstance(text, str):
            return text
    raise UserError(f'{place}: neither a string nor {{"text": T}} where T is a string, a list of them or null')


def cut(blocks: Iterable[str], separator: str | None) -> Iterator[Piece]:
    """The pieces of one text that arrives in blocks. A long document is cut at places that no token spans."""
    rest = ""
    for block in blocks:
        rest += block
        *whole, rest = rest.split(separator) if separator else [rest]
        for document in whole:
            yield Piece((yield from _shorten(document)), True)
        rest = yield from _shorten(rest)
    yield Piece(rest, True)


def _shorten(document: str) -> Generator[Piece, None, str]:
    """Yields pieces from the beginning of a long document; returns the rest."""
    while (at := _cut_place(document)) is not None:
        yield Piece(document[:at], False)
        document = document[at:]
    return document


def _cut_place(text: str) -> int | None:
    if len(text) <= 2 * PIECE_CHARS:
        return None
    for pattern in (_NEW_LINE, _NEW_WORD):
        if match := pattern.search(text, PIECE_CHARS, 2 * PIECE_CHARS):
            return match.start()
    return PIECE_CHARS if len(text) > _HARD_CUT_CHARS else None
