"""The header of a GGUF file: metadata, and where each tensor is (ggml's specification, docs/gguf.md, versions 2 and 3).

A file comes from an untrusted source: sizes and counts are bounded, and every offset is checked against the size of the
file before a tensor is read. The package `gguf` gets only blocks of tensors (`blocks.py`), never a file.
"""

import functools
import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mesh_transformer import files
from mesh_transformer.errors import UserError

T = TypeVar("T")
MAGIC = b"GGUF"
# vocabularies are in the header: 256,000 tokens and their merges have 10 MB
MAX_HEADER_BYTES = 256 << 20
MAX_METADATA, MAX_TENSORS = 1 << 14, 1 << 17
MAX_DIMENSIONS, MAX_NAME_BYTES = 4, 1 << 10
# more than any file: larger sizes are refused before they are multiplied
MAX_BYTES = 1 << 50
MAX_ALIGNMENT = 1 << 20
_FIRST_BYTES = 1 << 20
_ARRAY, _STRING, _BOOL = 9, 8, 7
_WORDS: Mapping[type, str] = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false", list: "a list of texts",
    np.ndarray: "a list of numbers",
}  # fmt: skip
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


class StoredTensor(NamedTuple):
    """One tensor of a local or `gs://` file.

    Args:
        shape: the last dimension is contiguous in the file, which lists it first.
        kind: the number of its type in ggml, such as 3 for Q4_1.
        start: the offset of its data in the file, bytes.
    """

    path: str
    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def kind_name(self) -> str:
        """The name of its type, such as "Q4_1"."""
        return kinds()[self.kind].name

    @property
    def row_bytes(self) -> int:
        """The bytes of one row: the last dimension."""
        kind = kinds()[self.kind]
        return self.shape[-1] // kind.block * kind.n_bytes

    @property
    def n_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


class Kind(NamedTuple):
    """A type of numbers: the numbers of a block, and its bytes."""

    name: str
    block: int
    n_bytes: int


class Header(NamedTuple):
    """The metadata by key, and the tensors by name. A list of strings is a list, a list of numbers an array."""

    path: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    def get(self, key: str, kind: type[T], default: Any = None) -> T | Any:
        """The value of a key; `default`: the file does not have it.

        Args:
            kind: str, int, float (whole numbers too), bool, list (of strings) or np.ndarray.

        Raises:
            UserError: it is of another kind.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        kinds: tuple[type, ...] = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind is not bool):
            raise UserError(f"{self.path}: {key} is {value!r:.60}: expected {_WORDS[kind]}")
        if kind is float and not math.isfinite(self.metadata[key]):
            raise UserError(f"{self.path}: {key} is {value}: expected a finite number")
        return value


@functools.cache
def kinds() -> dict[int, Kind]:
    """The types by number."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): Kind(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


def has_magic(path: str) -> bool:
    """Whether a file, local or `gs://`, begins as a GGUF file does. The file must exist."""
    return files.read_range(path, 0, len(MAGIC)) == MAGIC


def read_header(path: str) -> Header:
    """The header of a file.

    Raises:
        UserError: the file does not exist, is truncated, or is not a GGUF file; the message says where.
    """
    size, length = files.size(path), _FIRST_BYTES
    while True:
        content = files.read_range(path, 0, length)
        try:
            return _Reader(path, content, size).header()
        except _ShortError:
            if len(content) < length:
                raise UserError(f"{path}: its header ends at byte {size}: the file is cut; download it again") from None
            if length >= MAX_HEADER_BYTES:
                raise UserError(
                    f"{path}: its header has more than {MAX_HEADER_BYTES} bytes, more than any tokenizer needs: the "
                    "file is damaged; download it again"
                ) from None
            length = min(4 * length, MAX_HEADER_BYTES)


def decimal(value: float) -> float:
    """The shortest decimal that is the same float32 number: files have no wider ones."""
    return float(str(np.float32(value)))


class _ShortError(Exception):
    """The header goes on behind the bytes that were read."""


class _Reader:
    """Reads values from the first bytes of a file."""

    def __init__(self, path: str, content: bytes, size: int):
        self._path, self._content, self._size, self._at = path, content, size, 0

    def header(self) -> Header:
        """The whole header.

        Raises:
            _ShortError: more bytes are needed.
        """
        if self._content[: len(MAGIC)] != MAGIC:
            raise self._fault("it is not a GGUF file: it does not begin with GGUF")
        self._at = len(MAGIC)
        version = self._number("<u4")
        if version & 0xFFFF == 0:
            raise self._fault("a big-endian GGUF file is not read: convert it on a little-endian machine")
        if version not in (2, 3):
            raise self._fault(f"GGUF version {version} is not read, only 2 and 3: convert the model again")
        n_tensors, n_metadata = self._count(MAX_TENSORS, "tensors"), self._count(MAX_METADATA, "metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(n_metadata):
            key = self._text(MAX_NAME_BYTES, "a metadata key")
            if key in metadata:
                raise self._fault(f"the metadata key {key:.100} is there twice")
            metadata[key] = self._value(key)
        entries = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._fault(f"general.alignment is {alignment!r:.40}: expected a power of two of at least 8")
        start = -(-self._at // alignment) * alignment
        return Header(self._path, metadata, self._placed(entries, start, alignment))

    def _placed(self, entries: list[StoredTensor], start: int, alignment: int) -> dict[str, StoredTensor]:
        """The tensors with offsets in the file. They are inside of it and do not overlap."""
        tensors: dict[str, StoredTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._fault(f"{entry.name:.100} is there twice")
            if entry.start % alignment:
                raise self._fault(f"{entry.name:.100} begins at {entry.start}, no multiple of {alignment}")
            tensors[entry.name] = entry._replace(start=start + entry.start)
        stop = 0
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.n_bytes)):
            if tensor.start < stop:
                raise self._fault(f"{tensor.name:.100} overlaps the tensor before it")
            stop = tensor.start + tensor.n_bytes
            if stop > self._size:
                raise self._fault(
                    f"{tensor.name:.100} ends at byte {stop} and the file at {self._size}: the file is cut; download "
                    "it again"
                )
        return tensors

    def _tensor(self) -> StoredTensor:
        """A tensor whose `start` is an offset from the first tensor."""
        name = self._text(MAX_NAME_BYTES, "the name of a tensor")
        rank = self._number("<u4")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self._fault(f"{name:.100} has {rank} dimensions: expected 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._number("<u8") for _ in range(rank))[::-1]
        number, start = self._number("<u4"), self._number("<u8")
        if number not in kinds():
            raise self._fault(f"{name:.100} has the type {number}, which is not known: update the package gguf")
        if min(shape) < 1 or math.prod(shape) > MAX_BYTES or start > MAX_BYTES:
            raise self._fault(f"{name:.100} has the shape {shape} at {start}: the file is damaged")
        kind = kinds()[number]
        if shape[-1] % kind.block:
            raise self._fault(f"{name:.100}: rows of {shape[-1]} are no blocks of {kind.block}, as {kind.name} needs")
        return StoredTensor(self._path, name, shape, number, start)

    def _value(self, key: str) -> Any:
        kind = self._number("<u4")
        if kind != _ARRAY:
            return self._scalar(kind, key)
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            # each has at least its length
            self._need(8 * count)
            return self._texts(count, key)
        if kind not in _NUMBERS:
            raise self._fault(f"{key:.100} is a list of the type {kind}: expected strings or numbers")
        dtype = np.dtype(_NUMBERS[kind])
        content = self._take(count * dtype.itemsize)
        numbers = np.frombuffer(content, dtype)
        return numbers.astype(bool) if kind == _BOOL else numbers

    def _scalar(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._text(MAX_HEADER_BYTES, key)
        if kind not in _NUMBERS:
            raise self._fault(f"{key:.100} has the type {kind}: expected a string or a number")
        value = self._number(_NUMBERS[kind])
        return bool(value) if kind == _BOOL else value

    def _texts(self, count: int, key: str) -> list[str]:
        unpack, content, at = struct.Struct("<Q").unpack_from, self._content, self._at
        stop, texts = len(content), []
        try:
            for _ in range(count):
                if at + 8 > stop:
                    raise _ShortError
                (length,) = unpack(content, at)
                at += 8 + length
                if at > stop:
                    raise _ShortError
                texts.append(content[at - length : at].decode())
        except UnicodeDecodeError as error:
            raise self._fault(f"{key:.100} has a string that is not UTF-8") from error
        self._at = at
        return texts

    def _text(self, limit: int, what: str) -> str:
        length = self._number("<u8")
        if length > limit:
            raise self._fault(f"{what:.100} has {length} bytes: at most {limit} are read; the file is damaged")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._fault(f"{what:.100} is not UTF-8") from error

    def _count(self, limit: int, what: str) -> int:
        count = self._number("<u8")
        if count > limit:
            raise self._fault(f"it has {count} {what}: at most {limit} are read; the file is damaged")
        return int(count)

    def _number(self, dtype: str) -> Any:
        return np.frombuffer(self._take(np.dtype(dtype).itemsize), dtype)[0].item()

    def _take(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._content[self._at - count : self._at]

    def _need(self, count: int) -> None:
        """Raise _ShortError if fewer bytes are left; a UserError if the file cannot have them."""
        if self._at + count > min(self._size, MAX_HEADER_BYTES):
            raise self._fault(
                f"its header needs {count} bytes at byte {self._at}, the file has {self._size}: the file is cut or "
                "damaged; download it again"
            )
        if self._at + count > len(self._content):
            raise _ShortError

    def _fault(self, reason: str) -> UserError:
        return UserError(f"{self._path}: {reason}")
