"""PyTorch's own files (pytorch_model.bin), local or on `gs://`: which tensor lies where. Neither torch nor pickle is used.

A .bin file is a zip archive of one stored member for each storage, and a pickle that says which tensor is what part
of which storage. A pickle is a program; this one is gone through instruction by instruction, and anything but what a
plain dictionary of tensors needs is refused. Nothing in it is called.
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

MAX_PICKLE_BYTES = 1 << 20  # GPT-J-6B's is 40 kB; what one instruction leaves may take a hundred bytes
MAX_BYTES = 1 << 50  # more than any file: a larger size is not even multiplied
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
    """A function or class that is named; it is not looked up."""

    name: str


class _Storage(NamedTuple):
    """The member of the archive that holds the elements."""

    key: str
    dtype: np.dtype
    elements: int


class _Tensor(NamedTuple):
    """A part of a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _UnsupportedPickleError(Exception):
    """The pickle does something else than to describe a dictionary of tensors."""


def read_tensors(path: str) -> dict[str, FileTensor]:
    """The tensors of a file by name.

    Raises:
        UserError: the file is missing, damaged, or more than a dictionary of tensors.
    """
    records = _records(path)
    try:
        found = _run(_content(records["data.pkl"]))
    except _UnsupportedPickleError as error:
        raise UserError(f"{path} is no plain dictionary of tensors, {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: its pickle is damaged, a value is missing or wrong: {error!r:.200}"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__.strip('_')}, not a dictionary of tensors")
    tensors = {name: _file_tensor(path, records, name, tensor) for name, tensor in found.items()}
    named = {f"data/{tensor.storage.key}" for tensor in found.values()}
    if unnamed := [name for name in records if name.startswith("data/") and name not in named]:
        raise UserError(f"{path}: {unnamed[0]} belongs to no tensor: the file is damaged")
    return tensors


def _records(path: str) -> dict[str, archive.Entry]:
    """The members by their names without the folder that all of them are in."""
    try:
        members = archive.entries(path, at_once=HEADERS_AT_ONCE)
    except archive.DamagedArchive as error:
        raise UserError(
            f"{path} cannot be read ({error}): it is damaged, or older than torch 1.6; in that case load it with torch "
            "and save it again"
        ) from error
    records = {member.name.partition("/")[2]: member for member in members}
    if (
        len(records) != len(members)
        or "data.pkl" not in records
        or any(member.compressed for member in members)
        or ("byteorder" in records and _content(records["byteorder"]) != b"little")
    ):
        raise UserError(f"{path} is not laid out as torch.save does it")
    return records


def _file_tensor(path: str, records: dict[str, archive.Entry], name: str, tensor: Any) -> FileTensor:
    if not isinstance(tensor, _Tensor):
        raise UserError(f"{path}: {name} is a {type(tensor).__name__}, not a tensor")
    storage, size = tensor.storage, math.prod(tensor.shape)
    record = records.get(f"data/{storage.key}")
    if record is None or record.n_bytes != storage.elements * storage.dtype.itemsize:
        raise UserError(f"{path}: {name}: its storage is missing or of another size: the file is damaged")
    inner = [math.prod(tensor.shape[dim + 1 :]) for dim in range(len(tensor.shape))]
    in_order = all(
        count == 1 or stride == step
        for count, stride, step in zip(tensor.shape, tensor.strides, inner, strict=True)
    )
    if not in_order or tensor.offset + size > storage.elements:
        raise UserError(f"{path}: {name}: its bytes are not all there, or not in order")
    start = record.start + tensor.offset * storage.dtype.itemsize
    return FileTensor(path, name, tensor.shape, storage.dtype, start)


def _content(record: archive.Entry) -> bytes:
    if record.n_bytes > MAX_PICKLE_BYTES:
        raise UserError(f"{record.path}: its {record.name} is over {MAX_PICKLE_BYTES} bytes")
    try:
        return b"".join(archive.read_blocks(record, MAX_PICKLE_BYTES))
    except archive.DamagedArchive as error:
        raise UserError(f"{record.path} cannot be read ({error}): it is damaged") from error


def _run(pickle: bytes) -> Any:
    """What the pickle describes: tensors as _Tensor, everything else as it is."""
    stack: list[Any] = []
    below: list[list[Any]] = []  # what was on the stack at each mark that is still open
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
        if not isinstance(key, str):  # others may be nested so deeply that to hash them takes for ever
            raise _UnsupportedPickleError(f"a {type(key).__name__} is no name of a tensor")
        table[key] = value
    return table


def _set_attributes(table: Any, _: Any) -> Any:
    """The `_metadata` of a module's state are attributes of its dictionary. They are not kept."""
    if not isinstance(table, dict):
        raise _UnsupportedPickleError("its pickle gives attributes to what is no dictionary")
    return table


def _storage(reference: Any) -> _Storage:
    """A storage: ("storage", its class, the member's name, device, elements)."""
    kind, storage, key, _, elements = reference
    if kind != "storage" or not isinstance(storage, _Global) or not isinstance(key, str):
        raise ValueError("a reference to something else than a storage")
    if storage.name not in _STORAGES:
        raise _UnsupportedPickleError(f"{storage.name!r:.80} is not supported")
    if not _are_sizes((elements,)):
        raise ValueError("a storage without a size")
    return _Storage(key, _STORAGES[storage.name], elements)


def _call(function: Any, arguments: Any) -> Any:
    """What the three functions that may be named would give."""
    if not isinstance(function, _Global) or not isinstance(arguments, tuple):
        raise ValueError("a call of what is no function")
    if function.name == "collections OrderedDict" and not arguments:
        return {}
    if function.name == "torch._utils _rebuild_parameter" and isinstance(arguments[0], _Tensor):
        return arguments[0]
    if function.name != "torch._utils _rebuild_tensor_v2":
        raise _UnsupportedPickleError(f"its pickle calls {function.name!r:.80}")
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage) or not _are_sizes((offset,)):
        raise ValueError("a tensor of no storage")
    if not (_are_sizes(shape) and _are_sizes(strides) and len(shape) == len(strides)):
        raise ValueError("a tensor of no sizes")
    return _Tensor(storage, offset, shape, strides)


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, tuple)
        and len(values) <= MAX_DIMENSIONS
        and all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)
    )


# what an instruction leaves on the stack, of the values that it takes from there and of its own argument
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
