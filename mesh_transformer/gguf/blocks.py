"""The numbers of the blocks in which GGUF files store tensors."""

import functools

import ml_dtypes
import numpy as np

from mesh_transformer import files
from mesh_transformer.errors import UserError
from mesh_transformer.gguf.header import StoredTensor, kinds

# types that are read as they are stored
_FLOATS = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
    "F64": np.dtype(np.float64),
}  # fmt: skip
# numbers that are dequantised at a time: some types need ten times their size in between
_AT_ONCE = 1 << 19


def dtype_of(kind: int) -> np.dtype:
    """The dtype in which a type is read: its own for floats, float32 for quantised numbers.

    Raises:
        UserError: the type has no values of a model.
    """
    name = kinds()[kind].name
    if name not in _FLOATS and not _is_quantised(kind):
        raise UserError(f"the type {name} is no type of weights, or needs a newer version of the package gguf")
    return _FLOATS.get(name, np.dtype(np.float32))


def read_codes(tensor: StoredTensor, first: int, count: int) -> np.ndarray:
    """The blocks of `count` rows from row `first` on, as they are stored: uint8 (rows, blocks of a row, bytes of one).

    A row is the last dimension; the other dimensions are counted as one.

    Raises:
        UserError: the file is truncated.
    """
    kind = kinds()[tensor.kind]
    codes = np.empty((count, tensor.shape[-1] // kind.block, kind.n_bytes), np.uint8)
    n_bytes = files.read_into(tensor.path, tensor.start + first * tensor.row_bytes, codes.reshape(-1).data)
    if n_bytes != codes.size:
        raise UserError(f"{tensor.path}: {tensor.name}: {codes.size} bytes expected, {n_bytes} found")
    return codes


def read_rows(tensor: StoredTensor, first: int, out: np.ndarray) -> None:
    """Fill `out`, (rows, last dimension) of `dtype_of`, with rows from `first` on.

    Raises:
        UserError: the file is truncated.
    """
    dtype = dtype_of(tensor.kind)
    step = max(1, _AT_ONCE // tensor.shape[-1])
    for at in range(0, len(out), step):
        rows = out[at : at + step]
        codes = read_codes(tensor, first + at, len(rows))
        if kinds()[tensor.kind].name in _FLOATS:
            rows[...] = codes.reshape(len(rows), -1).view(dtype)
        else:
            import gguf

            kind = gguf.GGMLQuantizationType(tensor.kind)
            rows[...] = gguf.quants.dequantize(codes.reshape(len(rows), -1), kind)


@functools.cache
def _is_quantised(kind: int) -> bool:
    """Whether the package `gguf` can dequantise a type."""
    import gguf

    try:
        gguf.quants.dequantize(np.zeros((1, kinds()[kind].n_bytes), np.uint8), gguf.GGMLQuantizationType(kind))
    except NotImplementedError:
        return False
    return True
