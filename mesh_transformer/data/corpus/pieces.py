"""Reads documents from text, JSON-lines and tar files, compressed or not, in pieces of bounded size."""

import codecs
import io
import json
import logging
import os
import re
from collections.abc import Generator, Iterable, Iterator
from typing import IO, Any, NamedTuple

from mesh_transformer.data.corpus.tar import damage_explained, tar_members
from mesh_transformer.data.records.inflate import Account, Compression, inflated, without_suffix
from mesh_transformer.errors import BadDataError, UserError, plural
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
_ACCEPTED = ".txt, .jsonl, .tar, each also with .gz, .xz or .zst appended, .tgz, or a plain .xz"
# After a letter or digit, white space starts a new token in every byte-level tokenizer. The space stands first, because
# the search for a character is much faster than the search for a class.
_NEW_LINE = re.compile(r"\n(?<=[^\W_]\n)")
_NEW_WORD = re.compile(r" (?<=[^\W_] )")
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class TextPiece(NamedTuple):
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
    paths = sorted(os.path.join(folder, name) for folder, name in named if not name.startswith("."))
    files = [file for file in paths if _kind(file)[0] is not None]
    if not files:
        raise UserError(f"{path}: no input file in this folder; allowed: {_ACCEPTED}")
    skipped = [os.path.relpath(file, path) for file in paths if _kind(file)[0] is None]
    _warn_skipped(path, skipped[:_NAMED], len(skipped))
    return files


def file_pieces(path: str, separator: str | None) -> Iterator[TextPiece]:
    """The documents of one file, in pieces. A `separator` in a text ends a document.

    Raises:
        UserError: the file is missing, damaged or not UTF-8, or a line is not JSON; names the file and the place.
    """
    with open_binary(path) as file:
        yield from _pieces_of(file, path, os.path.basename(path), separator)


def _kind(name: str) -> tuple[str | None, Compression | None]:
    """(.txt | .jsonl | .tar | '' where only the decompressed content decides | None, compression)."""
    stem, compression = without_suffix(name)
    inner = os.path.splitext(stem)[1]
    if inner in _KINDS:
        return inner, compression
    return ("" if compression == "xz" else None), compression


def _pieces_of(
    file: IO[bytes], place: str, name: str, separator: str | None, account: Account | None = None
) -> Iterator[TextPiece]:
    kind, compression = _kind(name)
    if compression is not None:
        file = inflated(file, compression, place, account)
    if kind == "":
        head = file.peek(512) if isinstance(file, io.BufferedReader) else b""
        kind = ".tar" if head[257:262] == b"ustar" else ".txt"
    if kind == ".tar":
        yield from _tar_pieces(file, place, separator)
    elif kind == ".jsonl":
        for text in _json_texts(file, place):
            yield from cut([text], separator) if text is not None else [TextPiece("", True, null=True)]
    else:
        yield from cut(text_blocks(file, place, translate=True), separator)


def _tar_pieces(file: IO[bytes], place: str, separator: str | None) -> Iterator[TextPiece]:
    skipped, first, account = 0, list[str](), Account.of(file)
    with damage_explained(place):
        for name, data in tar_members(file, place):
            if os.path.basename(name).startswith("."):
                continue
            if _kind(name)[0] in (".txt", ".jsonl"):
                yield from _pieces_of(data, f"{place}: {name}", name, separator, account)
            else:
                skipped += 1
                first += [name] if skipped <= _NAMED else []
    _warn_skipped(place, first, skipped)


def _warn_skipped(place: str, first: list[str], count: int) -> None:
    """Warn of skipped files: how many, and the names of the first."""
    if count:
        shown = ", ".join(name[:100] for name in first) + (", ..." if count > _NAMED else "")
        _log.warning("%s: skipped %s (%s); allowed: %s", place, plural(count, "file"), shown, _ACCEPTED)


def text_blocks(file: IO[bytes], place: str, *, translate: bool) -> Iterator[str]:
    """The text of a UTF-8 file in blocks of at most PIECE_CHARS characters.

    Args:
        translate: every end of a line becomes a line feed.

    Raises:
        BadDataError: it is not UTF-8; names the byte.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = io.IncrementalNewlineDecoder(None, translate=True)
    read, ended = 0, False
    while not ended:
        data = file.read(PIECE_CHARS)
        read, ended = read + len(data), not data
        try:
            block = decoder.decode(data, ended)
        except UnicodeDecodeError as error:
            at = read - len(error.object) + error.start
            reason = f"not UTF-8 text ({error.reason}): convert the file to UTF-8"
            raise BadDataError(f"{place}, byte {at:,}", "not UTF-8", reason) from error
        yield lines.decode(block, ended) if translate else block


def _json_texts(file: IO[bytes], place: str) -> Iterator[str | None]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise line_too_long(f"{place}, line {number}")
        if line.strip():
            yield json_text(line, f"{place}, line {number}")


def line_too_long(place: str) -> BadDataError:
    """The error for a line over the bound."""
    return BadDataError(place, "line too long", f"longer than {MAX_LINE_BYTES} bytes: split it into documents")


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


def json_value(line: bytes, place: str, fields: str) -> Any:
    """The value of a line of JSON. `fields`: the required fields, for messages.

    Raises:
        BadDataError: the line is not JSON, or has more than MAX_OUTSIDE_BYTES outside strings.
    """
    if _has_too_much_outside(line):
        reason = f"more than {MAX_OUTSIDE_BYTES} bytes outside strings: remove fields other than {fields}"
        raise BadDataError(place, "too much outside strings", reason)
    try:
        # json.loads accepts bytes in UTF-16 too, where `_has_too_much_outside` finds no strings
        return json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadDataError(place, "not JSON", f"not JSON ({error})") from error


def json_text(line: bytes, place: str, column: str = "text") -> str | None:
    """The text of a line; None if it is null. A list of paragraphs is joined by empty lines, as the original does.

    Raises:
        BadDataError: as `json_value`, or the line has no text in `column`.
    """
    value = json_value(line, place, column)
    if isinstance(value, str):
        return value
    has = isinstance(value, dict) and column in value
    text = value[column] if has else 0
    if isinstance(text, list) and all(isinstance(paragraph, str) for paragraph in text):
        return "\n\n".join(text)
    if text is None or isinstance(text, str):
        return text
    raise BadDataError(
        place,
        "no text" if not has else "not text",
        f"neither a string nor {{{json.dumps(column)}: T}} where T is a string, a list of them or null",
    )


def cut(blocks: Iterable[str], separator: str | None) -> Iterator[TextPiece]:
    """The pieces of one text that arrives in blocks. A long document is cut at places that no token spans."""
    rest = ""
    for block in blocks:
        rest += block
        *documents, rest = rest.split(separator) if separator else [rest]
        for document in documents:
            yield TextPiece((yield from _shorten(document)), True)
        rest = yield from _shorten(rest)
    yield TextPiece(rest, True)


def _shorten(document: str) -> Generator[TextPiece, None, str]:
    """Yields pieces from the beginning of a long document; returns the rest."""
    start = 0
    while (stop := _cut_place(document, start)) is not None:
        yield TextPiece(document[start:stop], False)
        start = stop
    return document[start:]


def _cut_place(text: str, start: int) -> int | None:
    """Where a piece that begins at `start` ends; None if the text is too short to tell."""
    first, last = start + PIECE_CHARS, start + 2 * PIECE_CHARS
    if len(text) <= last:
        return None
    for pattern in (_NEW_LINE, _NEW_WORD):
        if match := pattern.search(text, first, last):
            return match.start()
    return first if len(text) > start + _HARD_CUT_CHARS else None
