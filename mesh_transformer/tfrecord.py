"""What TensorFlow's files are made of: framed records with checksums, and the fields of protocol buffers."""

from __future__ import annotations

import math
import struct

import google_crc32c

_CHECKSUM = struct.Struct("<I")
_MAX_SINGLE = 3.4028234663852886e38


def framed(data: bytes) -> bytes:
    """A record as it lies in a file: length (u64), checksum of the length, data, checksum of the data."""
    header = struct.pack("<Q", len(data))
    return b"".join((header, _checksum(header), data, _checksum(data)))


def masked_crc32c(data: bytes) -> int:
    """The checksum of the format: crc32c rotated right by 15 bits plus a constant, modulo 2**32."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a message: an int (0 or more) as a varint, a float as a double, bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    if isinstance(value, float):
        return _varint(number << 3 | 1) + struct.pack("<d", value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def single(number: int, value: float) -> bytes:
    """A field in single precision; what is beyond that is infinite."""
    fits = abs(value) <= _MAX_SINGLE
    return _varint(number << 3 | 5) + struct.pack("<f", value if fits else value * math.inf)


def _varint(value: int) -> bytes:
    digits = []
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _checksum(data: bytes) -> bytes:
    return _CHECKSUM.pack(masked_crc32c(data))
