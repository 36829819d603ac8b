"""Writes a checkpoint in the original program's format, in any number of shards. Holds two whole arrays in memory."""

import contextlib
import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.classic import folder as layout
from mesh_transformer.checkpoint.classic.folder import Leaf
from mesh_transformer.checkpoint.classic.npz import NpzWriter
from mesh_transformer.checkpoint.tensors import TensorSource, prefetch, slots
from mesh_transformer.config import ModelConfig
from mesh_transformer.environment import command
from mesh_transformer.errors import UserError
from mesh_transformer.logs import Transfer
from mesh_transformer.spec import Split

BLOCK_BYTES = 1 << 20
# the slots of the original program's optimizer
ADAM = {"mu", "nu"}
DTYPES = tuple(np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16))


def write_classic(
    source: TensorSource,
    config: ModelConfig,
    folder: str,
    shards: int,
    *,
    full: bool | None = None,
    dtype: np.dtype | None = None,
) -> None:
    """Write `folder/shard_K/{0..15}.npz`; `folder` is a step folder.

    Args:
        full: whether to write Adam's moments; None: if `source` has them.
        dtype: of the parameters: float32, float16 or bfloat16; None: as stored. Moments keep their stored dtype.

    Raises:
        UserError: the model, the number of shards or a stored dtype is not supported, or moments are missing (nothing
            is written); or a value is too large for float16.
    """
    full = bool(slots(source)) if full is None else full
    order = layout.leaves(config, full=full)
    layout.check_shards(config, shards, source.where)
    _check_writable(source, config, order, full=full)
    total = sum(math.prod(leaf.shape) * _dtype(source, leaf, dtype).itemsize for leaf in order)
    for shard in range(shards):
        files.make_folder(files.join(folder, f"shard_{shard}"))
    with Transfer("writing classic shards", total) as transfer:
        wholes = prefetch(_whole(source, leaf) for leaf in order)
        for number, arrays in enumerate(layout.group_by_file(order)):
            with contextlib.ExitStack() as stack:
                writers = []
                for shard in range(shards):
                    file = stack.enter_context(files.open_binary(layout.shard_file(folder, shard, number), "wb"))
                    writers.append(stack.enter_context(contextlib.closing(NpzWriter(file))))
                for leaf in arrays:
                    output_dtype = _dtype(source, leaf, dtype)
                    _write_leaf(leaf, next(wholes), writers, output_dtype)
                    transfer.add(math.prod(leaf.shape) * output_dtype.itemsize)


def _check_writable(source: TensorSource, config: ModelConfig, order: list[Leaf], *, full: bool) -> None:
    """Refuse a source that `write_classic` cannot write.

    Raises:
        UserError: a tensor is missing or has another shape or an unsupported dtype.
    """
    if full and (found := slots(source)) not in (set(), ADAM):
        raise UserError(
            f"{source.where} holds the state of an optimizer other than Adam ({', '.join(sorted(found))}): a full "
            f"classic checkpoint needs Adam's moments. To write only the parameters, use {command('slim')}"
        )
    for leaf in order:
        if leaf.tensor is None:
            continue
        info = source.tensors.get(leaf.tensor)
        if info is None:
            needs = "a full classic checkpoint" if full else "this configuration"
            raise UserError(f"{source.where} has no {leaf.tensor}, which {needs} needs")
        if info.dtype not in DTYPES:
            raise UserError(f"{source.where}: {leaf.tensor} is {info.dtype}: expected one of {DTYPES}")
        if not _fits(leaf, info.shape, config):
            raise UserError(f"{source.where}: {leaf.tensor} is {info.shape}, the config has {leaf.shape}")


def _fits(leaf: Leaf, shape: tuple[int, ...], config: ModelConfig) -> bool:
    expected = leaf.shape if leaf.layer is None else (config.layers, *leaf.shape)
    return len(shape) == len(expected) and all(
        found == size or (axis == leaf.vocab_axis and found > size)
        for axis, (found, size) in enumerate(zip(shape, expected, strict=True))
    )


def _dtype(source: TensorSource, leaf: Leaf, dtype: np.dtype | None) -> np.dtype:
    if leaf.split is Split.COUNT:
        return np.dtype(np.int32)
    example = "params/head/norm/scale" if leaf.tensor is None else leaf.tensor
    stored = source.tensors[example].dtype
    return dtype if dtype is not None and leaf.name.startswith("params/") else stored


def _write_leaf(leaf: Leaf, whole: np.ndarray, writers: list[NpzWriter], dtype: np.dtype) -> None:
    shape = leaf.shard_shape(len(writers))
    for shard, writer in enumerate(writers):
        if leaf.split in (Split.ROWS, Split.COLUMNS):
            width = shape[leaf.axis]
            cut = slice(shard * width, (shard + 1) * width)
            part = whole[cut] if leaf.axis == 0 else whole[..., cut]
        elif leaf.split is Split.SUM:
            # every shard stores an equal part of the sum
            part = (whole.astype(np.float64) / len(writers)).astype(whole.dtype)
        elif leaf.split is Split.FIRST and shard > 0:
            part = np.full(shape, leaf.unused, whole.dtype)
        else:
            part = whole
        writer.add(shape, dtype, _converted(leaf, part, dtype))


def _whole(source: TensorSource, leaf: Leaf) -> np.ndarray:
    if leaf.split is Split.COUNT:
        counts = dict(zip(layout.COUNTS, source.counts, strict=True))
        return np.array(counts[leaf.name], np.int32)
    if leaf.tensor is None:
        return np.full(leaf.shape, leaf.unused, np.float32)
    # without padding
    index = tuple(slice(0, size) for size in leaf.shape)
    if leaf.layer is None:
        return source.read(leaf.tensor, index)
    stacked = source.read(leaf.tensor, (slice(leaf.layer, leaf.layer + 1), *index))
    return stacked.reshape(leaf.shape)


def _converted(leaf: Leaf, part: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The values cast to `dtype`, in blocks of rows."""
    rows = part.reshape(part.shape or (1,))
    row_bytes = max(1, math.prod(rows.shape[1:]) * rows.dtype.itemsize)
    step = max(1, BLOCK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        with np.errstate(over="ignore"):
            written = block.astype(dtype, copy=False)
        if dtype == np.float16 and block.dtype != dtype and (np.isinf(written) & np.isfinite(block)).any():
            raise UserError(f"{leaf.name} has values outside the range of float16: write bfloat16 instead")
        yield written
