"""A JSON array: a document an element. Elements are as long as lines of JSON may be."""

import re
from collections.abc import Iterator
from typing import IO

from mesh_transformer.data.corpus import pieces as corpus
from mesh_transformer.data.corpus.formats.base import Bad, Column, InputFormat, Item
from mesh_transformer.data.corpus.formats.lines import document
from mesh_transformer.errors import BadDataError

_STEP_BYTES = 1 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANKS = b" \t\r\n"
# outside of a string what begins and ends values, in a string what ends it
_OUTSIDE, _INSIDE = re.compile(rb'["\[\]{},]'), re.compile(rb'["\\]')


def stream(file: IO[bytes], place: str, column: Column) -> Iterator[Item]:
    """The documents of all elements.

    Raises:
        BadDataError: the file is no array, or the array is not closed.
    """
    for at, element in _elements(file, place):
        where = f"{place}, element at byte {at:,}"
        if element is None:
            yield Bad.of(corpus.line_too_long(where))
            continue
        try:
            yield from document(element, where, column)
        except BadDataError as error:
            yield Bad.of(error)


def check(file: IO[bytes], place: str, column: Column) -> None:
    """Raises BadDataError if the file does not begin as an array."""
    _begin(file, place)


def _begin(file: IO[bytes], place: str) -> tuple[int, bytes] | None:
    """The place of the first byte after the opening bracket, and the bytes from there that were read. None: the file is
    blank."""
    at, content = 0, b""
    while not content and (block := file.read(_STEP_BYTES)):
        content = (block.removeprefix(_BYTE_ORDER_MARK) if not at else block).lstrip(_BLANKS)
        at += len(block)
    if not content:
        return None
    if not content.startswith(b"["):
        reason = "no JSON array: expected [ at its start; name a file with an object a line .jsonl"
        raise BadDataError(place, "not an array", reason)
    return at - len(content) + 1, content[1:]


def _elements(file: IO[bytes], place: str) -> Iterator[tuple[int, bytes | None]]:
    """The place and the bytes of each element; None for one that is too long."""
    begun = _begin(file, place)
    if begun is None:
        return
    at, block = begun
    block = block or file.read(_STEP_BYTES)
    depth, in_string, start, parts, size = 0, False, at, list[bytes](), 0
    ended = after_comma = False
    while block:
        first = i = 0
        while (match := (_INSIDE if in_string else _OUTSIDE).search(block, i)) and not ended:
            i, char = match.end(), match.group()
            if char == b"\\":
                # the next byte does not end the string; it may stand in the next block
                if i == len(block):
                    block += file.read(1)
                i += 1
            elif char == b'"':
                in_string = not in_string
            elif char in b"[{":
                depth += 1
            elif depth and char in b"]}":
                depth -= 1
            elif char == b"}":
                raise BadDataError(
                    place, "not an array", f"a bracket that nothing opens, at byte {at + match.start():,}"
                )
            elif not depth:
                parts.append(block[first : match.start()])
                size += match.start() - first
                element = b"".join(parts) if size <= corpus.MAX_LINE_BYTES else None
                # an empty array has an empty element
                if element is None or element.strip(_BLANKS) or char == b"," or after_comma:
                    yield start, element
                after_comma = char == b","
                start, first, parts, size, ended = at + i, i, [], 0, char == b"]"
        size += len(block) - first
        if size <= corpus.MAX_LINE_BYTES:
            parts.append(block[first:])
        at += len(block)
        if ended and b"".join(parts).strip(_BLANKS):
            raise BadDataError(place, "not an array", f"more text after the array, at byte {start:,}: remove it")
        if ended:
            parts, size = [], 0
        block = file.read(_STEP_BYTES)
    if not ended:
        raise BadDataError(place, "not an array", "the array is not closed: the file may be cut")


FORMAT = InputFormat(".json", stream, check=check)
