"""Any checkpoint, written as a Hugging Face folder: safetensors with an index, config.json, generation_config.json."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.hf.safetensors_file import copy_transposed, encode_header
from mesh_transformer.checkpoint.hf.source import SAFETENSORS, export_tensor, foreign_shape
from mesh_transformer.checkpoint.tensors import Index, TensorSource, parameter_shapes, prefetch
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.families.spec import TRANSPOSED, Tensor
from mesh_transformer.logs import log

SHARD_BYTES = 5_000_000_000
BLOCK_BYTES = 128 << 20  # read at a time; two are held
# converted and written at a time: the memory of larger arrays is new, and cleared, each time
CAST_BYTES = 16 << 20


class _OutputTensor(NamedTuple):
    """One tensor to be written: its name, its shape, the rows of all that it holds, and the layer."""

    name: str
    shape: tuple[int, ...]
    rows: list[Tensor]
    layer: int


_Block = tuple[_OutputTensor, np.ndarray]  # some rows of a tensor, not yet cast


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
        UserError: transformers does not compute this model, `source` does not fit `model`, or a value is too
            large for `dtype`.
        DamagedCheckpoint: `source` cannot be read.
    """
    dtype = dtype or stored_dtype(source)
    config = config_json(model, dtype, end_of_text)
    check_source(source, model)
    files.make_folder(folder)
    shards = _shards(_plan(model), dtype, shard_bytes)
    for name, shard in shards.items():
        with files.open_binary(files.join(folder, name), "wb") as file:
            file.write(encode_header((planned.name, planned.shape, dtype) for planned in shard))
            for block in prefetch(_converted(source, prefetch(_blocks(source, shard, dtype)), dtype)):
                file.write(block.data.cast("B"))
                progress(block.nbytes)
    if len(shards) > 1:
        weight_map = {planned.name: name for name, shard in shards.items() for planned in shard}
        index = {"metadata": {"total_size": n_bytes(model, dtype)}, "weight_map": weight_map}
        _write_json(files.join(folder, f"{SAFETENSORS}.index.json"), index)
    _write_json(files.join(folder, "generation_config.json"), _end_of_text_ids(model, end_of_text))
    _write_json(files.join(folder, "config.json"), config)


def config_json(model: ModelConfig, dtype: np.dtype, end_of_text: int | None = None) -> dict[str, Any]:
    """The config.json of a model stored in `dtype`.

    Without `end_of_text` it is the family's, or null where the vocabulary does not reach so far.

    Raises:
        UserError: transformers does not compute this model.
    """
    return {
        "architectures": [model.HF_ARCHITECTURE],
        "model_type": model.HF_MODEL_TYPE,
        **model.to_hf(),
        "initializer_range": 0.02,
        "use_cache": True,
        **_end_of_text_ids(model, end_of_text),
        "dtype": str(dtype),
        "torch_dtype": str(dtype),  # its name before transformers 4.56
    }


def _end_of_text_ids(model: ModelConfig, end_of_text: int | None) -> dict[str, int | None]:
    """The generation_config.json: where a text ends."""
    if end_of_text is None and model.n_vocab > model.HF_END_OF_TEXT:
        end_of_text = model.HF_END_OF_TEXT
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def check_source(source: TensorSource, model: ModelConfig) -> None:
    """Refuse a source that is not of this model.

    Raises:
        UserError: a parameter is missing or has another shape.
    """
    shapes = parameter_shapes(model)
    for row in model.hf_tensors():
        found, expected = source.tensors.get(f"params/{row.parameter}"), shapes[row.parameter]
        if found is None or found.shape != expected:
            shape = found.shape if found else "nothing"
            raise UserError(
                f"{source.where}: params/{row.parameter}: expected shape {expected}, found {shape}"
            )


def stored_dtype(source: TensorSource) -> np.dtype:
    """The dtype of all parameters, or float32 if they differ."""
    dtypes = {info.dtype for name, info in source.tensors.items() if name.startswith("params/")}
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def n_bytes(model: ModelConfig, dtype: np.dtype) -> int:
    """Bytes of all tensors together."""
    return sum(math.prod(planned.shape) for planned in _plan(model)) * dtype.itemsize


def _plan(model: ModelConfig) -> list[_OutputTensor]:
    """In the order of the computation, layer by layer."""
    plan: list[_OutputTensor] = []
    for stacked, rows in itertools.groupby(model.hf_tensors(), lambda row: row.stacked):
        together: dict[str, list[Tensor]] = {}
        for row in rows:
            together.setdefault(row.foreign, []).append(row)
        shapes = {name: foreign_shape(members[0], model) for name, members in together.items()}
        for layer in range(model.layers if stacked else 1):
            for name, members in together.items():
                plan.append(_OutputTensor(name.format(layer), shapes[name], members, layer))
    return plan


def _shards(plan: list[_OutputTensor], dtype: np.dtype, limit: int) -> dict[str, list[_OutputTensor]]:
    """What each file holds, by its name."""
    shards: list[list[_OutputTensor]] = []
    room = 0
    for planned in plan:
        size = math.prod(planned.shape) * dtype.itemsize
        if not shards or size > room:
            shards.append([])
            room = limit
        shards[-1].append(planned)
        room -= size
    if len(shards) == 1:
        return {SAFETENSORS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _blocks(source: TensorSource, shard: list[_OutputTensor], dtype: np.dtype) -> Iterator[_Block]:
    """Their tensors, some rows at a time: of those that are ours or ours transposed. Others come whole, one at a time."""
    for planned in shard:
        row, shape = planned.rows[0], planned.shape
        info = source.tensors[f"params/{row.parameter}"]
        log.debug("%s %s %s, from %s", planned.name, shape, dtype, _source_names(planned))
        if row.view not in (None, TRANSPOSED):
            whole = tuple(slice(0, n) for n in info.shape[row.stacked :])
            parts = [_read(source, member, planned.layer, whole) for member in planned.rows]
            yield planned, export_tensor(row, parts[0] if row.part is None else np.stack(parts))
            continue
        rows = max(1, BLOCK_BYTES // (math.prod(shape[1:]) * max(dtype.itemsize, info.dtype.itemsize)))
        for first in range(0, shape[0], rows):
            theirs = (slice(first, min(first + rows, shape[0])), *(slice(0, n) for n in shape[1:]))
            ours = theirs if row.view is None else theirs[::-1]
            yield planned, export_tensor(row, _read(source, row, planned.layer, ours))


def _converted(source: TensorSource, blocks: Iterator[_Block], dtype: np.dtype) -> Iterator[np.ndarray]:
    """The blocks as they are written, some rows at a time, as unsigned integers of the same bits."""
    for planned, rows in blocks:
        step = max(1, CAST_BYTES // (math.prod(rows.shape[1:]) * dtype.itemsize))
        for first in range(0, len(rows), step):
            band = _cast(rows[first : first + step], dtype, f"{source.where}: {_source_names(planned)}")
            if band.ndim == 2 and not band.flags.c_contiguous:
                matrix, band = band.T, np.empty(band.shape, dtype)
                copy_transposed(band, matrix)
            yield np.ascontiguousarray(band).view(f"u{dtype.itemsize}")


def _source_names(planned: _OutputTensor) -> str:
    return ", ".join(f"params/{row.parameter}" for row in planned.rows)


def _read(source: TensorSource, row: Tensor, layer: int, index: Index) -> np.ndarray:
    """A slice of our parameter, of one layer; a bias that they lack is added to the rows of its table."""
    name = f"params/{row.parameter}"
    if row.stacked:
        return source.read(name, (slice(layer, layer + 1), *index))[0]
    values = source.read(name, index)
    if row.bias and f"params/{row.bias}" in source.tensors:
        bias = source.read(f"params/{row.bias}", (index[1],))
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
    files.replace(path, json.dumps(value, indent=2, sort_keys=True).encode() + b"\n")
