"""The safetensors format: an 8-byte header length, a JSON header, then the tensors' bytes without gaps.

A file comes from an untrusted source: the size of the header is bounded, and every offset is checked against the size
of the file before a tensor is read.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.tensors import MAX_DIMENSIONS, FileTensor
from mesh_transformer.config.strict_json import parse_object
from mesh_transformer.errors import UserError

# more than any file: larger sizes are refused before they are multiplied
MAX_BYTES = 1 << 50
# about 30,000 tensors
MAX_HEADER_BYTES = 4 << 20
# rows and columns of a tile: of 32 to 512, the fastest for elements of two and four bytes
TILE = 128

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def copy_transposed(target: np.ndarray, source: np.ndarray) -> None:
    """Set target[...] = source.T, for matrices (m, n) and (n, m) that are larger than the processor's caches.

    Works by tiles, and copies each tile to contiguous memory first: with a row stride that is a power of two, the
    elements of a column evict each other from the cache. Three to five times as fast as numpy's copy.
    """
    for row in range(0, target.shape[0], TILE):
        for column in range(0, target.shape[1], TILE):
            tile = source[column : column + TILE, row : row + TILE].copy()
            target[row : row + TILE, column : column + TILE] = tile.T


def read_header(path: str) -> dict[str, FileTensor]:
    """The tensors of a file by name.

    Raises:
        UserError: the file does not exist, is truncated, or is not a safetensors file; the message says where.
    """
    size = files.size(path)
    length = int.from_bytes(files.read_range(path, 0, 8), "little")
    if size < 8 or length > size - 8:
        raise UserError(
            f"{path}: its {size} bytes cannot hold a header of {length} bytes: the file is truncated or is not a "
            "safetensors file; download it again"
        )
    if length > MAX_HEADER_BYTES:
        raise UserError(
            f"{path}: its header has {length} bytes, at most {MAX_HEADER_BYTES} are read: split the tensors over "
            "several files"
        )
    header = parse_object(files.read_range(path, 8, length), f"{path}: its header")
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, entry, 8 + length) for name, entry in header.items()]
    _check_without_gaps(path, tensors, 8 + length, size)
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: str, name: str, entry: Any, data_start: int) -> FileTensor:
    try:
        code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {name}: its header entry is incomplete") from error
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
        raise UserError(f"{path}: {name}: its shape or offsets are not whole numbers of 0 or more")
    if not isinstance(code, str) or code not in DTYPES:
        raise UserError(f"{path}: {name}: dtype {code!r:.40} is not supported: expected one of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or max(shape, default=0) > MAX_BYTES:
        raise UserError(
            f"{path}: {name}: its shape has more than {MAX_DIMENSIONS} dimensions or a dimension over {MAX_BYTES}"
        )
    expected = math.prod(shape) * DTYPES[code].itemsize
    if stop - start != expected:
        raise UserError(f"{path}: {name}: {code} {tuple(shape)} takes {expected} bytes, not {stop - start}")
    return FileTensor(path, name, tuple(shape), DTYPES[code], data_start + start)


def _check_without_gaps(path: str, tensors: Iterable[FileTensor], start: int, size: int) -> None:
    """Check that the tensors cover the data exactly, without gaps or overlaps."""
    for tensor in sorted(tensors, key=lambda t: (t.start, math.prod(t.shape))):
        if tensor.start != start:
            raise UserError(f"{path}: {tensor.name} begins at byte {tensor.start}, expected {start}")
        start += math.prod(tensor.shape) * tensor.dtype.itemsize
    if start != size:
        raise UserError(
            f"{path}: {size} bytes, its tensors end at byte {start}: the file is truncated or damaged; download it "
            "again"
        )


def encode_header(tensors: Iterable[tuple[str, tuple[int, ...], np.dtype]]) -> bytes:
    """The header of a file with tensors (name, shape, dtype) in this order; their bytes follow it."""
    # transformers refuses files without the format
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape, dtype in tensors:
        end = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # the data begins at a multiple of 8 bytes
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
