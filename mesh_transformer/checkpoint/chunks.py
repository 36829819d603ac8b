"""How a tensor is cut into the chunks of a native checkpoint, and in which pieces chunks are read and written."""

import itertools
import math
from collections.abc import Iterator, Sequence

from mesh_transformer.checkpoint.tensors import Index, TensorInfo

CHUNK_BYTES = 2 << 20  # a slice for one of many devices reads little more than its own bytes
ROWS_BYTES = 16 << 20  # of the whole rows that a row of chunks holds: what a writer reads at a time


def chunk_shape(info: TensorInfo) -> tuple[int, ...]:
    """A part of one matrix of a stack, of at most CHUNK_BYTES; those beside each other hold at most ROWS_BYTES."""
    shape = [1 if n < len(info.shape) - 2 else max(1, size) for n, size in enumerate(info.shape)]
    while len(shape) > 1 and shape[-2] > 1 and shape[-2] * info.shape[-1] * info.dtype.itemsize > ROWS_BYTES:
        shape[-2] = -(-shape[-2] // 2)
    while max(shape, default=1) > 1 and math.prod(shape) * info.dtype.itemsize > CHUNK_BYTES:
        longest = shape.index(max(shape))
        shape[longest] = -(-shape[longest] // 2)
    return tuple(shape)


def pieces(spans: Sequence[range], chunk: Sequence[int], itemsize: int, limit: int) -> Iterator[Index]:
    """The part of a tensor that `spans` name, in C order, each chunk in one piece only.

    A piece is a contiguous block of the grid of chunks, of `limit` bytes at most unless one chunk has more; of chunks
    that `spans` cut it holds a part.
    """
    grid = [range(s.start // c, -(-s.stop // c)) for s, c in zip(spans, chunk, strict=True)]
    room, block = max(1, limit // (math.prod(chunk) * itemsize)), [1] * len(grid)
    for dim in reversed(range(len(grid))):
        block[dim] = max(1, min(len(grid[dim]), room))
        room = room // block[dim] if block[dim] == len(grid[dim]) else 1
    for corner in itertools.product(*(numbers[::n] for numbers, n in zip(grid, block, strict=True))):
        yield tuple(
            slice(max(span.start, at * size), min(span.stop, (at + n) * size))
            for span, at, n, size in zip(spans, corner, block, chunk, strict=True)
        )
