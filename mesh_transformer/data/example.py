"""The one message a record holds: a `tf.train.Example` whose int64 feature `text` is a list of tokens.

    Example{1: Features{1: entry{1: "text", 2: Feature{3: Int64List{1: packed varints}}}}}

Written byte for byte as TensorFlow does; read with packed or unpacked numbers, other features passed over.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mesh_transformer.errors import UserError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10
_MAX_TOKEN = 2**31 - 1
_OTHER_LISTS = {1: "bytes", 2: "floats"}  # the kinds of a Feature beside int64


def encode_example(tokens: np.ndarray) -> bytes:
    """The serialised Example of `tokens`, integers (n,) that are not negative."""
    packed = _encode_varints(tokens)
    entry = _field(1, b"text") + _field(2, _field(3, _field(1, packed)))
    return _field(1, _field(1, entry))


def decode_example(data: bytes) -> np.ndarray:
    """The tokens of a serialised Example, int32 (n,).

    Raises:
        UserError: not an Example, no feature `text`, one of bytes or floats, or a number that is no token.
    """
    chunks: list[np.ndarray] | None = None
    names = []
    for entry in (e for features in _submessages(data, 1) for e in _submessages(features, 1)):
        name = b"".join(_submessages(entry, 1)).decode("utf-8", "replace")
        names.append(name)
        if name == "text":
            chunks = [ints for feature in _submessages(entry, 2) for ints in _tokens(feature)]
    if chunks is None:
        raise UserError(f"the record has no feature `text` (it has: {', '.join(names[:5]) or 'none'})")
    values = np.concatenate(chunks) if chunks else np.empty(0, np.uint64)
    if values.size and values.max() > _MAX_TOKEN:
        raise UserError(f"the record holds a number that is no token: {int(values.max().astype(np.int64))}")
    return values.astype(np.int32)


def _tokens(feature: bytes) -> Iterator[np.ndarray]:
    for number, _ in _fields(feature):
        if number in _OTHER_LISTS:
            raise UserError(
                f"its feature `text` holds {_OTHER_LISTS[number]}; tokens must be int64: make the records from the text "
                "with create_finetune_tfrecords.py"
            )
    for int64_list in _submessages(feature, 3):
        single = []
        for number, value in _fields(int64_list):
            if number != 1:
                continue
            if isinstance(value, int):
                single.append(value & (2**64 - 1))
            else:
                yield _decode_varints(value)
        if single:
            yield np.array(single, np.uint64)


def _submessages(data: bytes, wanted: int) -> Iterator[bytes]:
    for number, value in _fields(data):
        if number == wanted and isinstance(value, bytes):
            yield value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The (field number, value) pairs of a message; fixed-width values come as their bytes."""
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise UserError(f"the record is not a tf.train.Example (wire type {kind})")
        if size > len(data) - at:
            raise UserError("the record is not a tf.train.Example (a field runs past its end)")
        if kind == _BYTES:
            yield number, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_MAX_VARINT_BYTES):
        if at + shift >= len(data):
            break
        byte = data[at + shift]
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, at + shift + 1
    raise UserError("the record is not a tf.train.Example (a number without an end)")


def _decode_varints(data: bytes) -> np.ndarray:
    """All varints of `data` at once, uint64 (n,)."""
    raw = np.frombuffer(data, np.uint8)
    if not raw.size:
        return np.empty(0, np.uint64)
    lasts = np.flatnonzero(raw < 0x80)
    if not lasts.size or lasts[-1] != raw.size - 1:
        raise UserError("the record is not a tf.train.Example (a number without an end)")
    firsts = np.concatenate(([0], lasts[:-1] + 1))
    sizes = lasts - firsts + 1
    if sizes.max() > _MAX_VARINT_BYTES:
        raise UserError("the record is not a tf.train.Example (a number of more than 64 bits)")
    values = np.zeros(lasts.size, np.uint64)
    for k in range(int(sizes.max())):
        longer = sizes > k
        digits = (raw[firsts[longer] + k] & 0x7F).astype(np.uint64)
        values[longer] |= digits << np.uint64(7 * k)
    return values


def _encode_varints(values: np.ndarray) -> bytes:
    """The varints of `values` one behind the other."""
    rest = np.asarray(values).astype(np.uint64)
    columns, used = [], [np.ones(rest.size, bool)]
    while True:
        more = rest >= 0x80
        columns.append((rest & np.uint64(0x7F)).astype(np.uint8) | (more.astype(np.uint8) << 7))
        if not more.any():
            break
        used.append(more)
        rest = rest >> np.uint64(7)
    return np.stack(columns, 1)[np.stack(used, 1)].tobytes()


def _field(number: int, value: bytes) -> bytes:
    head, size = [number << 3 | _BYTES], len(value)
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*head, size]) + value
