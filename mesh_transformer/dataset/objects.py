"""The objects that the tasks of a job write, local or on gs://. An object appears whole or not at all.

An object of a task begins with the task's result as JSON, from which the next driver of an interrupted job reads it.
The payload follows.
"""

import contextlib
import os
import platform
import struct
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import IO, Any, ClassVar, Protocol, TypeVar, cast

from pydantic import TypeAdapter

from mesh_transformer.errors import RunError, UserError
from mesh_transformer.files import is_remote, read_range, upload

_MAGIC = b"mtjpart1"
_HEAD = struct.Struct("<8sQ")
# the payload begins at a multiple of it, so that its numbers are aligned
_ALIGNED = 64
# one read has the whole result, except for results of thousands of parts
_FIRST_READ = 16 << 10


class Result(Protocol):
    """A dataclass that JSON can hold. `at` is the offset of the payload in the object, bytes."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def at(self) -> int: ...


R = TypeVar("R", bound=Result)


@contextlib.contextmanager
def atomic_file(target: str, scratch: str) -> Iterator[IO[bytes]]:
    """A file that becomes the object `target` at the end of the `with` block. Nothing appears if the block raises.

    Args:
        scratch: a folder on the disk of `target`, if `target` is local; else any gs:// path.

    Raises:
        UserError: this node does not have the folder.
    """
    remote = is_remote(target)
    path = os.path.join(_folder(scratch) or tempfile.gettempdir(), f".{uuid.uuid4().hex}.tmp")
    try:
        with open(path, "w+b") as file:
            yield file
            file.flush()
            if not remote:
                # after a power failure, a renamed file must have its content
                os.fsync(file.fileno())
        if remote:
            upload(path, target)
        else:
            os.replace(path, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def spool(scratch: str, memory: int = 0) -> IO[bytes]:
    """A temporary file without a name, which ends with the process. On the disk of `scratch`, if that is local.

    Args:
        memory: a file of up to so many bytes is in memory.

    Raises:
        UserError: this node does not have the folder.
    """
    folder = _folder(scratch)
    if memory:
        return cast(IO[bytes], tempfile.SpooledTemporaryFile(memory, dir=folder))
    return tempfile.TemporaryFile(dir=folder, buffering=1 << 16)


def _folder(scratch: str) -> str | None:
    """The folder for temporary files; None for the system's folder."""
    if is_remote(scratch):
        return None
    if not os.path.isdir(scratch):
        raise UserError(
            f"{platform.node()} has no folder {os.path.abspath(scratch)}: give an --output that all nodes share, such "
            "as one on gs://; and do not delete the folder while a job writes to it"
        )
    return scratch


def write_object(target: str, scratch: str, result: R, payload: Iterable[bytes | memoryview]) -> R:
    """Write a result and its payload as one object. Returns the result with `at`."""
    content = _adapter(type(result)).dump_json(result)
    content = content.ljust(-(-(_HEAD.size + len(content)) // _ALIGNED) * _ALIGNED - _HEAD.size)
    with atomic_file(target, scratch) as file:
        file.write(_HEAD.pack(_MAGIC, len(content)) + content)
        for block in payload:
            file.write(block)
    return replace(result, at=_HEAD.size + len(content))


def read_result(kind: type[R], path: str) -> R:
    """The result at the beginning of an object, with `at`.

    Raises:
        RunError: the object has another format.
    """
    data = read_range(path, 0, _FIRST_READ)
    magic, length = _HEAD.unpack(data[: _HEAD.size]) if len(data) >= _HEAD.size else (b"", 0)
    if magic != _MAGIC:
        raise RunError(f"{path} is not an object of prepare_dataset.py: delete it, and give the same command again")
    stop = _HEAD.size + length
    content = data[_HEAD.size : stop] + read_range(path, len(data), stop - len(data))
    return replace(_adapter(kind).validate_json(content), at=stop)


@cache
def _adapter(kind: type[R]) -> TypeAdapter[R]:
    return TypeAdapter(kind)
