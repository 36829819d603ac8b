"""Finds the tensors in PyTorch's files (pytorch_model.bin), local or `gs://`, without torch and without unpickling.

A .bin file is a zip archive with one stored member per storage, and a pickle that describes each tensor as a part of a
storage. A pickle is a program. This module interprets its instructions, and refuses every instruction and name that a
dictionary of tensors does not need. It calls nothing that the pickle names.
"""

import math
import operator
import pickletools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from mesh_transformer.checkpoint import archive
from mesh_transformer.checkpoint.tensors import MAX_DIMENSIONS, FileTensor
from mesh_transformer.errors import UserError

# GPT-J-6B's pickle has 40 kB; the result of an instruction can take a hundred bytes
MAX_PICKLE_BYTES = 1 << 20
# more than any file: larger sizes are refused before they are multiplied
MAX_BYTES = 1 << 50
HEADERS_AT_ONCE = 16

_PLAIN = re.compile(r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)")
_STORAGES = {
    "torch DoubleStorage": np.dtype(np.float64),
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch LongStorage": np.dtype("<i8"),
    "torch IntStorage": np.dtype("<i4"),
    "torch ShortStorage": np.dtype("<i2"),
    "torch CharStorage": np.dtype(np.int8),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch BoolStorage": np.dtype(np.bool_),
}
_LITERALS = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1")
_IGNORED = {"PROTO", "FRAME", "STOP"}


class _Global(NamedTuple):
    """The name of a function or class in the pickle. It is never imported."""

    name: str


class _Storage(NamedTuple):
    """A storage: the member of the archive with its elements."""

    key: str
    dtype: np.dtype
    elements: int


class _Tensor(NamedTuple):
    """A tensor: a part of a storage. Offset and strides are in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _UnsupportedPickleError(Exception):
    """The pickle does more than describe a dictionary of tensors."""


def read_tensors(path: str) -> dict[str, FileTensor]:
    """The tensors of a file by name.

    Raises:
        UserError: the file does not exist, is damaged, or holds anything but a dictionary of tensors.
    """
    records = _records(path)
    try:
        found = _run(_content(records["data.pkl"]))
    except _UnsupportedPickleError as error:
        raise UserError(f"{path} is not a plain dictionary of tensors: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: its pickle is damaged, with a missing or wrong value: {error!r:.200}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__.strip('_')}, not a dictionary of tensors")
    tensors = {name: _file_tensor(path, records, name, tensor) for name, tensor in found.items()}
    used = {f"data/{tensor.storage.key}" for tensor in found.values()}
    if unused := [name for name in records if name.startswith("data/") and name not in used]:
        raise UserError(f"{path}: {unused[0]} belongs to no tensor: the file is damaged")
    return tensors


def _records(path: str) -> dict[str, archive.Entry]:
    """The members by name, without their common folder."""
    try:
        members = archive.entries(path, at_once=HEADERS_AT_ONCE)
    except archive.DamagedArchive as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged, or in the format before torch 1.6; if so, load it with "
            "torch and save it again"
        ) from error
    records = {member.name.partition("/")[2]: member for member in members}
    if (
        len(records) != len(members)
        or "data.pkl" not in records
        or any(member.compressed for member in members)
        or ("byteorder" in records and _content(records["byteorder"]) != b"little")
    ):
        raise UserError(f"{path} does not have the layout that torch.save writes")
    return records


def _file_tensor(path: str, records: dict[str, archive.Entry], name: str, tensor: Any) -> FileTensor:
    if not isinstance(tensor, _Tensor):
        raise UserError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
    storage, size = tensor.storage, math.prod(tensor.shape)
    record = records.get(f"data/{storage.key}")
    if record is None or record.n_bytes != storage.elements * storage.dtype.itemsize:
        raise UserError(f"{path}: {name}: its storage is missing or has another size: the file is damaged")
    inner = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape))]
    in_order = all(
        count == 1 or stride == step for count, stride, step in zip(tensor.shape, tensor.strides, inner, strict=True)
    )
    if not in_order or tensor.offset + size > storage.elements:
        raise UserError(
            f"{path}: {name}: its elements are not contiguous in C order, or are outside its storage: save it with "
            ".contiguous()"
        )
    start = record.start + tensor.offset * storage.dtype.itemsize
    return FileTensor(path, name, tensor.shape, storage.dtype, start)


def _content(record: archive.Entry) -> bytes:
    if record.n_bytes > MAX_PICKLE_BYTES:
        raise UserError(
            f"{record.path}: its {record.name} has {record.n_bytes} bytes, at most {MAX_PICKLE_BYTES} are read"
        )
    try:
        return b"".join(archive.read_blocks(record, MAX_PICKLE_BYTES))
    except archive.DamagedArchive as error:
        raise UserError(f"{record.path} cannot be read ({error}): it is damaged") from error


def _run(pickle: bytes) -> Any:
    """The object that the pickle describes, with tensors as `_Tensor`."""
    stack: list[Any] = []
    # the stack below each open mark
    below: list[list[Any]] = []
    memo: dict[int, Any] = {}
    argument: Any
    for instruction, argument, _ in pickletools.genops(pickle):
        op = instruction.name
        if op == "MARK":
            below.append(stack)
            stack = []
        elif op in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else argument] = stack[-1]
        elif op in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif op in _RESULTS:
            values = [] if argument is None else [argument]
            for kind in reversed(instruction.stack_before):
                if kind is pickletools.stackslice:
                    values.append(stack)
                elif kind is pickletools.markobject:
                    stack = below.pop()
                else:
                    values.append(stack.pop())
            stack.append(_RESULTS[op](*reversed(values)))
        elif op not in _IGNORED:
            raise _UnsupportedPickleError(f"its pickle has the instruction {op}")
    return stack.pop()


def _global(name: str) -> _Global:
    if not _PLAIN.fullmatch(name):
        raise _UnsupportedPickleError(f"its pickle names {name!r:.80}")
    return _Global(name)


def _set_items(table: Any, pairs: list[Any]) -> Any:
    for key, value in zip(pairs[::2], pairs[1::2], strict=True):
        # other keys can be nested so deeply that their hash takes forever
        if not isinstance(key, str):
            raise _UnsupportedPickleError(f"a tensor's name is a {type(key).__name__}")
        table[key] = value
    return table


def _set_attributes(table: Any, _: Any) -> Any:
    """Ignore the attribute `_metadata` of the state dictionary of a module."""
    if not isinstance(table, dict):
        raise _UnsupportedPickleError("its pickle sets attributes of an object that is not a dictionary")
    return table


def _storage(reference: Any) -> _Storage:
    """A storage: ("storage", its class, the member's name, device, elements)."""
    kind, storage, key, _, elements = reference
    if kind != "storage" or not isinstance(storage, _Global) or not isinstance(key, str):
        raise ValueError("a reference to an object that is not a storage")
    if storage.name not in _STORAGES:
        raise _UnsupportedPickleError(f"{storage.name!r:.80} is not supported")
    if not _are_sizes((elements,)):
        raise ValueError("a storage without a size")
    return _Storage(key, _STORAGES[storage.name], elements)


def _call(function: Any, arguments: Any) -> Any:
    """The result of one of the three supported functions."""
    if not isinstance(function, _Global) or not isinstance(arguments, tuple):
        raise ValueError("a call of an object that is not a function")
    if function.name == "collections OrderedDict" and not arguments:
        return {}
    if function.name == "torch._utils _rebuild_parameter" and isinstance(arguments[0], _Tensor):
        return arguments[0]
    if function.name != "torch._utils _rebuild_tensor_v2":
        raise _UnsupportedPickleError(f"its pickle calls {function.name!r:.80}")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage) or not _are_sizes((offset,)):
        raise ValueError("a tensor without a storage")
    if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides)):
        raise ValueError("a tensor without valid sizes")
    return _Tensor(storage, offset, shape, strides)


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)
    )


# the result that an instruction pushes on the stack, as a function of the values that it pops and of its argument
_RESULTS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_LITERALS, lambda literal: literal),
    **dict.fromkeys(("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"), lambda *values: values),
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "TUPLE": tuple,
    "GLOBAL": _global,
    "APPEND": lambda items, item: operator.iadd(items, [item]),
    "APPENDS": operator.iadd,
    "SETITEM": lambda table, key, value: _set_items(table, [key, value]),
    "SETITEMS": _set_items,
    "BUILD": _set_attributes,
    "BINPERSID": _storage,
    "REDUCE": _call,
}
