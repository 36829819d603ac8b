"""Finds the record files of a data set by its name."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from mesh_transformer.errors import UserError
from mesh_transformer.files import exists, is_remote, join, open_binary, seen_from

_RECORD_FILE = re.compile(r"\.tfrecords?(\.(gz|gzip|zlib|z))?$", re.IGNORECASE)
_MAX_INDEX_BYTES = 16 << 20
_MAX_LISTED = 100_000
_LOOKUPS_AT_ONCE = 16
Side = Literal["train", "val"]


def find_source(source: str, side: Side = "train") -> str:
    """The path of `source`: as given, or under `data/`. In the folder of a data set, it is the file of this side.

    Raises:
        UserError: neither path exists; names both.
    """
    tried = [source]
    if not is_remote(source) and not os.path.isabs(source):
        tried.append(os.path.join("data", source))
    for path in tried:
        for file in (path, join(path, f"{side}.index"), join(path, f"{side}.txt")):
            if _is_file(file):
                return file
    raise UserError(
        f"data set not found, tried {' and '.join(tried)}{seen_from(source)}: give an index file (one record file a "
        f"line), a .tfrecords file, a .txt file, or a folder with {side}.index or {side}.txt, by its path, its gs:// "
        "address or its name under data/"
    )


def is_text(path: str) -> bool:
    """Whether the path names a text file."""
    return path.lower().endswith(".txt")


def record_files(path: str) -> tuple[str, ...]:
    """The record files of an index file, or the record file itself.

    A relative path is tried in the current folder, in the folder of the index and in the folder above it.

    Raises:
        UserError: the index is empty, too long or not text, or names a file that does not exist.
    """
    if _RECORD_FILE.search(path):
        return (path,)
    lines, listed = _index_lines(path), list[str]()
    with ThreadPoolExecutor(_LOOKUPS_AT_ONCE) as pool:
        # `map` asks for all files before the first answer
        for first in range(0, len(lines), _LOOKUPS_AT_ONCE):
            listed += pool.map(lambda line: _find_listed(path, *line), lines[first : first + _LOOKUPS_AT_ONCE])
    return tuple(listed)


def _index_lines(path: str) -> list[tuple[int, str]]:
    """The line numbers (from 1) and texts of the lines that are not blank."""
    with open_binary(path) as file:
        content = file.read(_MAX_INDEX_BYTES + 1)
    try:
        if len(content) > _MAX_INDEX_BYTES or b"\0" in content:
            raise ValueError("too long, or not text")
        text = content.decode("utf-8-sig")
    except ValueError as error:
        raise UserError(
            f"{path} is not an index file (a text with one record file a line): "
            f"record files end in .tfrecords, text files in .txt"
        ) from error
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise UserError(f"the index file {path} is empty: write the path of one record file on each line")
    if len(lines) > _MAX_LISTED:
        raise UserError(
            f"the index file {path} lists {len(lines):,} record files, at most {_MAX_LISTED:,} are allowed: make "
            "larger files"
        )
    return lines


def _find_listed(index: str, number: int, line: str) -> str:
    folder = os.path.dirname(index)
    above = os.path.dirname(folder if is_remote(index) else os.path.abspath(folder))
    if is_remote(line) or os.path.isabs(line):
        tried = [line]
    else:
        tried = [*([] if is_remote(index) else [line]), join(folder, line), join(above, line)]
    for path in tried:
        if _is_file(path):
            return path
    raise UserError(f"{index}, line {number}: record file not found, tried {', '.join(dict.fromkeys(tried))}")


def _is_file(path: str) -> bool:
    return exists(path) if is_remote(path) else os.path.isfile(path)
