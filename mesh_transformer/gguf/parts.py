"""A GGUF file, or the parts in which llama.cpp splits large ones: NAME-00001-of-00003.gguf."""

import os
import re

from mesh_transformer import files
from mesh_transformer.errors import UserError, listed
from mesh_transformer.gguf.header import Header, StoredTensor, read_header

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)?")
MAX_PARTS = 1000


def part_names(name: str) -> list[str]:
    """The names of all parts of a file, given the name of one; of a whole file its own name.

    Raises:
        UserError: the name has more parts than any file.
    """
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= count <= MAX_PARTS:
        raise UserError(f"{name}: a file has 1 to {MAX_PARTS} parts, not {count}")
    return [f"{match['stem']}-{number:05d}-of-{count:05d}{match['end'] or ''}" for number in range(1, count + 1)]


def stem(path: str) -> str:
    """The name of a model: the file's without the folder, the ending and the number of its part."""
    name = os.path.basename(path)
    match = _PART.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


def open_parts(path: str) -> Header:
    """The header of a file with the tensors of all its parts; the metadata are of the first part.

    Args:
        path: the file, or any of its parts, local or `gs://`.

    Raises:
        UserError: a part is missing, or is none of this file; or a header cannot be read.
    """
    folder, _, name = path.rpartition("/")
    paths = [files.join(folder, part) if folder else part for part in part_names(name)]
    missing = [part for part in paths if len(paths) > 1 and not files.exists(part)]
    if missing:
        raise UserError(f"{path} is one of {len(paths)} parts, of which are missing: {listed(missing)}")
    headers = [read_header(part) for part in paths]
    tensors: dict[str, StoredTensor] = {}
    for number, header in enumerate(headers):
        _check_part(header, number, len(headers))
        if twice := tensors.keys() & header.tensors.keys():
            raise UserError(f"{header.path}: {min(twice)} is in another part too")
        tensors |= header.tensors
    expected = headers[0].get("split.tensors.count", int, len(tensors))
    if expected != len(tensors):
        raise UserError(f"{path}: split.tensors.count is {expected}, and its parts have {len(tensors)} tensors")
    return Header(paths[0], headers[0].metadata, tensors)


def _check_part(header: Header, number: int, count: int) -> None:
    said = header.get("split.no", int, 0), header.get("split.count", int, 0) or 1
    if said != (number, count):
        raise UserError(
            f"{header.path}: it says that it is part {said[0]} (from 0) of {said[1]}, and its name that it is {number} "
            f"of {count}: give it the name that it was split under"
        )
