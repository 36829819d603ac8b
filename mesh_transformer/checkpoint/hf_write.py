"""Any checkpoint, written as a Hugging Face folder: safetensors with an index, config.json, generation_config.json."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.ahead import ahead
from mesh_transformer.checkpoint.hf_config import to_hf, to_hf_generation
from mesh_transformer.checkpoint.hf_files import SAFETENSORS
from mesh_transformer.checkpoint.hf_layout import (
    EMBEDDING,
    EMBEDDING_BIAS,
    Entry,
    check_exports,
    entries,
    padded,
)
from mesh_transformer.checkpoint.safetensors_file import encode_header
from mesh_transformer.checkpoint.tensors import Index, TensorSource
from mesh_transformer.checkpoint.transpose import copy_transposed
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.logs import log

SHARD_BYTES = 5_000_000_000
BLOCK_BYTES = 128 << 20  # read at a time; two are held
BAND_BYTES = (
    16 << 20
)  # converted and written at a time: the memory of larger arrays is new, and cleared, each time


class _Planned(NamedTuple):
    """One tensor to be written: `hf` is its name."""

    hf: str
    entry: Entry
    layer: int


def write_hf(
    source: TensorSource,
    model: ModelConfig,
    folder: str,
    *,
    dtype: np.dtype | None = None,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the parameters of `source` to a new `folder`, local or on gs://. A few blocks of tensors are held at a time.

    Args:
        dtype: of all tensors; None: as they are stored, or float32 if they differ.
        end_of_text: the tokenizer's, for config.json.
        shard_bytes: most bytes of tensors in one file, unless one tensor alone has more.
        progress: told of each block how many bytes were written.

    Raises:
        UserError: GPTJForCausalLM does not compute this model, `source` does not fit `model`, or a value is too
            large for `dtype`.
        DamagedCheckpoint: `source` cannot be read.
    """
    check_exports(model)
    check_source(source, model)
    dtype = dtype or stored_dtype(source)
    config = to_hf(model, dtype, end_of_text)
    files.make_folder(folder)
    shards = _shards(_plan(model), dtype, shard_bytes)
    names = _shard_names(len(shards))
    for name, shard in zip(names, shards, strict=True):
        with files.open_binary(files.join(folder, name), "wb") as file:
            _write_shard(file, source, shard, dtype, progress)
    if len(shards) > 1:
        weight_map = {p.hf: name for name, shard in zip(names, shards, strict=True) for p in shard}
        index = {"metadata": {"total_size": n_bytes(model, dtype)}, "weight_map": weight_map}
        _write_json(files.join(folder, f"{SAFETENSORS}.index.json"), index)
    _write_json(files.join(folder, "generation_config.json"), to_hf_generation(model, end_of_text))
    _write_json(files.join(folder, "config.json"), config)


def check_source(source: TensorSource, model: ModelConfig) -> None:
    """Refuse a source that is not of this model.

    Raises:
        UserError: a parameter is missing or has another shape.
    """
    for entry in entries(model):
        found, expected = source.tensors.get(entry.name), padded(entry, model)
        if found is None or found.shape != expected:
            shape = found.shape if found else "nothing"
            raise UserError(f"{source.where}: {entry.name}: expected shape {expected}, found {shape}")


def stored_dtype(source: TensorSource) -> np.dtype:
    """The dtype of all parameters, or float32 if they differ."""
    dtypes = {info.dtype for name, info in source.tensors.items() if name.startswith("params/")}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def n_bytes(model: ModelConfig, dtype: np.dtype) -> int:
    """Bytes of all tensors together."""
    return sum(math.prod(planned.entry.hf_shape) for planned in _plan(model)) * dtype.itemsize


def _plan(model: ModelConfig) -> list[_Planned]:
    """In the order of the computation, layer by layer."""
    plan: list[_Planned] = []
    for stacked, group in itertools.groupby(entries(model), lambda entry: entry.stacked):
        layers, members = range(model.layers if stacked else 1), list(group)
        plan += [_Planned(entry.hf.format(layer), entry, layer) for layer in layers for entry in members]
    return plan


def _shards(plan: list[_Planned], dtype: np.dtype, limit: int) -> list[list[_Planned]]:
    shards: list[list[_Planned]] = []
    room = 0
    for planned in plan:
        size = math.prod(planned.entry.hf_shape) * dtype.itemsize
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(planned)
        room -= size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SAFETENSORS]
    return [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]


def _write_shard(
    file: IO[bytes],
    source: TensorSource,
    shard: list[_Planned],
    dtype: np.dtype,
    progress: Callable[[int], None],
) -> None:
    file.write(encode_header((planned.hf, planned.entry.hf_shape, dtype) for planned in shard))
    for block in ahead(_converted(source, ahead(_blocks(source, shard, dtype)), dtype)):
        file.write(block.data.cast("B"))
        progress(block.nbytes)


def _blocks(
    source: TensorSource, shard: list[_Planned], dtype: np.dtype
) -> Iterator[tuple[Entry, np.ndarray]]:
    """Our parameters in the order of their tensors, some of their rows at a time."""
    for planned in shard:
        entry, shape = planned.entry, planned.entry.hf_shape
        log.debug("%s %s %s, from %s", planned.hf, shape, dtype, entry.name)
        row_bytes = math.prod(shape[1:]) * max(dtype.itemsize, source.tensors[entry.name].dtype.itemsize)
        rows = max(1, BLOCK_BYTES // row_bytes)
        for first in range(0, shape[0], rows):
            theirs = (slice(first, min(first + rows, shape[0])), *(slice(0, n) for n in shape[1:]))
            yield entry, _read(source, planned, theirs[::-1] if entry.transposed else theirs)


def _converted(
    source: TensorSource, blocks: Iterator[tuple[Entry, np.ndarray]], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """The blocks as they are written, some rows at a time, as unsigned integers of the same bits."""
    for entry, values in blocks:
        rows = values.T if entry.transposed else values
        step = max(1, BAND_BYTES // (math.prod(rows.shape[1:]) * dtype.itemsize))
        for first in range(0, len(rows), step):
            band = _cast(rows[first : first + step], dtype, f"{source.where}: {entry.name}")
            if entry.transposed:
                matrix, band = band.T, np.empty(band.shape, dtype)
                copy_transposed(band, matrix)
            yield np.ascontiguousarray(band).view(f"u{dtype.itemsize}")


def _read(source: TensorSource, planned: _Planned, index: Index) -> np.ndarray:
    """A slice of our parameter, of one layer; the bias of the embedding is added to the rows of its table."""
    name = planned.entry.name
    if planned.entry.stacked:
        return source.read(name, (slice(planned.layer, planned.layer + 1), *index))[0]
    values = source.read(name, index)
    if name == EMBEDDING and EMBEDDING_BIAS in source.tensors:
        bias = source.read(EMBEDDING_BIAS, (index[1],))
        if bias.any():  # else the rows stay as they are, to the sign of a zero
            return values.astype(np.float32) + bias.astype(np.float32)
    return values


def _cast(values: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """The values in another dtype, rounded to nearest even.

    Raises:
        UserError: a finite value is too large for it.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast).all() and not np.array_equal(np.isfinite(cast), np.isfinite(values)):
        raise UserError(f"{where} holds values that are too large for {dtype}: choose --dtype bf16 or fp32")
    return cast


def _write_json(path: str, value: dict[str, Any]) -> None:
    with files.open_binary(path, "wb") as file:
        file.write(json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")
