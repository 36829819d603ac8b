"""Writes a checkpoint as a Hugging Face folder: safetensors with an index, config.json, generation_config.json."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.hf.config import parse_model
from mesh_transformer.checkpoint.hf.safetensors_file import copy_transposed, encode_header
from mesh_transformer.checkpoint.hf.source import (
    SAFETENSORS,
    exact,
    export_tensor,
    foreign_names,
    foreign_shape,
    stacked_rows,
    uniform_dtype,
)
from mesh_transformer.checkpoint.origin import Origin, write_files
from mesh_transformer.checkpoint.tensors import Index, TensorSource, parameter_shapes, prefetch
from mesh_transformer.config import ModelConfig, strict_json
from mesh_transformer.errors import UserError, options_to_add
from mesh_transformer.logs import log
from mesh_transformer.spec import TRANSPOSED, Tensor

SHARD_BYTES = 5_000_000_000
# read at a time; two blocks are held
BLOCK_BYTES = 128 << 20
# cast and written at a time: larger arrays get new, cleared memory for each allocation
CAST_BYTES = 16 << 20
# tensors in one file: the header of more could exceed what safetensors_file reads
SHARD_TENSORS = 20_000


class _OutputTensor(NamedTuple):
    """A tensor to write: its name, shape and dtype, the rows of the parameters in it, and its index in the parameters:
    the layer and the expert."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    rows: list[Tensor]
    place: tuple[int, ...]


# some rows of a tensor, before the cast
_Block = tuple[_OutputTensor, np.ndarray]


def write_hf(
    source: TensorSource,
    model: ModelConfig,
    folder: str,
    *,
    dtype: np.dtype | None = None,
    origin: Origin | None = None,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the parameters of `source` to a new `folder`, local or `gs://`. Holds a few blocks of tensors in memory.

    Args:
        dtype: of all tensors but the biases of routers, which are not rounded; None: the stored dtype of each.
        origin: the folder that the checkpoint came from; its files are written too.
        end_of_text: the tokenizer's end-of-text token, for config.json; None: the origin's, or the family's.
        shard_bytes: maximum bytes of tensors in one file; a larger tensor gets a file of its own.
        progress: called with the number of bytes of each block that was written.

    Raises:
        UserError: transformers does not support this model, `source` is of another model, or a value is too large for
            `dtype`.
        DamagedCheckpoint: `source` cannot be read.
    """
    if origin is None:
        texts = _new_texts(model, dtype or stored_dtype(source), end_of_text)
    else:
        texts = _kept_texts(model, dtype, origin, end_of_text)
    check_source(source, model)
    files.make_folder(folder)
    plan = _plan(source, model, dtype)
    shards = _shards(plan, shard_bytes)
    for name, shard in shards.items():
        with files.open_binary(files.join(folder, name), "wb") as file:
            file.write(encode_header((planned.name, planned.shape, planned.dtype) for planned in shard))
            for block in prefetch(_converted(source, prefetch(_blocks(source, shard)))):
                file.write(block.data.cast("B"))
                progress(block.nbytes)
    if len(shards) > 1:
        weight_map = {planned.name: name for name, shard in shards.items() for planned in shard}
        index = {"metadata": {"total_size": sum(map(_size, plan))}, "weight_map": weight_map}
        write_files({f"{SAFETENSORS}.index.json": _json(index)}, folder)
    write_files(texts, folder)


def config_json(model: ModelConfig, dtype: np.dtype, end_of_text: int | None = None) -> dict[str, Any]:
    """The config.json of a model stored in `dtype`.

    Without `end_of_text`, the token is the family's, or null if the vocabulary does not include it.

    Raises:
        UserError: transformers does not support this model.
    """
    keys = model.to_hf()
    return {
        "architectures": [model.HF_ARCHITECTURE],
        "model_type": model.HF_MODEL_TYPE,
        **keys,
        "initializer_range": 0.02,
        "use_cache": True,
        **_end_of_text_ids(model, end_of_text),
        "dtype": str(dtype),
        # the key before transformers 4.56
        "torch_dtype": str(dtype),
    }


def _end_of_text_ids(model: ModelConfig, end_of_text: int | None) -> dict[str, int | None]:
    """The content of generation_config.json: the token that ends a text."""
    if end_of_text is None and model.n_vocab > model.HF_END_OF_TEXT:
        end_of_text = model.HF_END_OF_TEXT
    return {"bos_token_id": end_of_text, "eos_token_id": end_of_text}


def _new_texts(model: ModelConfig, dtype: np.dtype, end_of_text: int | None) -> dict[str, bytes]:
    """The files that are no weights, by name."""
    ids = _json(_end_of_text_ids(model, end_of_text))
    return {"generation_config.json": ids, "config.json": _json(config_json(model, dtype, end_of_text))}


def _kept_texts(
    model: ModelConfig, dtype: np.dtype | None, origin: Origin, end_of_text: int | None
) -> dict[str, bytes]:
    """The files of the origin by name, with the changes that the arguments need."""
    ids = {} if end_of_text is None else _end_of_text_ids(model, end_of_text)
    texts = dict(origin.files)
    for name, changes in {
        "config.json": _changes(model, dtype, origin) | ids,
        "generation_config.json": ids,
    }.items():
        if changes:
            before = strict_json.parse_object(texts[name], name) if name in texts else {}
            texts[name] = _json(before | changes, sort_keys=False)
    return texts


def _changes(model: ModelConfig, dtype: np.dtype | None, origin: Origin) -> dict[str, Any]:
    """The keys of the origin's config.json that differ for this model, stored in `dtype`; None: as in the origin."""
    config = strict_json.parse_object(origin.files["config.json"], "config.json")
    before, now = parse_model(config, "config.json").to_hf(), model.to_hf()
    changes = {name: value for name, value in now.items() if before.get(name) != value}
    if changes:
        # raises UserError if a key has a second name in the file
        parse_model(config | changes, "config.json")
    if dtype is not None and dtype != origin.dtype:
        changes |= {name: str(dtype) for name in ("dtype", "torch_dtype") if name in config}
    if config.get("tie_word_embeddings") is True and any(row.tied for row in model.hf_tensors()):
        # the head is a parameter of its own here
        changes["tie_word_embeddings"] = False
    return changes


def check_source(source: TensorSource, model: ModelConfig) -> None:
    """Refuse a source of another model.

    Raises:
        UserError: a parameter is missing or has another shape.
    """
    shapes = parameter_shapes(model)
    for row in stacked_rows(model):
        found, expected = source.tensors.get(f"params/{row.parameter}"), shapes[row.parameter]
        if found is None or found.shape != expected:
            shape = found.shape if found else "no tensor"
            raise UserError(f"{source.where}: params/{row.parameter}: expected shape {expected}, found {shape}")


def stored_dtype(source: TensorSource) -> np.dtype:
    """The stored dtype of the parameters, or float32 if their dtypes differ."""
    return uniform_dtype(source) or np.dtype(np.float32)


def n_bytes(source: TensorSource, model: ModelConfig, dtype: np.dtype | None) -> int:
    """Total size of all tensors in bytes, with the arguments of `write_hf`."""
    check_source(source, model)
    return sum(map(_size, _plan(source, model, dtype)))


def _size(planned: _OutputTensor) -> int:
    return math.prod(planned.shape) * planned.dtype.itemsize


def _plan(source: TensorSource, model: ModelConfig, dtype: np.dtype | None) -> list[_OutputTensor]:
    """All tensors to write, in the order of the computation, layer by layer."""
    plan: list[_OutputTensor] = []
    by_name: dict[tuple[str, Any], list[Tensor]] = {}
    for row in stacked_rows(model):
        by_name.setdefault((row.foreign, row.layers), []).append(row)
    tensors = [sorted(parts, key=lambda row: (row.part or 0, row.first_row)) for parts in by_name.values()]
    for _, stage in itertools.groupby(tensors, lambda parts: parts[0].stacked):
        of_stage = []
        for parts in stage:
            first = parts[0]
            shape, stored = foreign_shape(first, model), source.tensors[f"params/{first.parameter}"].dtype
            rounds = dtype is not None and dtype.itemsize <= stored.itemsize
            cast = stored if dtype is None or (rounds and exact(first.parameter)) else dtype
            for place, name in foreign_names(first, model):
                of_stage.append(_OutputTensor(name, shape, cast, parts, place))
        plan += sorted(of_stage, key=lambda planned: planned.rows[0].layer(planned.place))
    return plan


def _shards(plan: list[_OutputTensor], limit: int) -> dict[str, list[_OutputTensor]]:
    """The tensors in each file, by the name of the file."""
    shards: list[list[_OutputTensor]] = []
    available = 0
    for planned in plan:
        size = _size(planned)
        if not shards or size > available or len(shards[-1]) == SHARD_TENSORS:
            shards.append([])
            available = limit
        shards[-1].append(planned)
        available -= size
    if len(shards) == 1:
        return {SAFETENSORS: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _blocks(source: TensorSource, shard: list[_OutputTensor]) -> Iterator[_Block]:
    """The tensors of a file: equal or transposed parameters in blocks of rows, others as one block per tensor."""
    for planned in shard:
        row, shape, dtype = planned.rows[0], planned.shape, planned.dtype
        info = source.tensors[f"params/{row.parameter}"]
        log.debug("%s %s %s, from %s", planned.name, shape, dtype, _source_names(planned))
        if row.view not in (None, TRANSPOSED):
            whole = tuple(slice(0, n) for n in info.shape[row.stack_rank :])
            parts = [_read(source, member, planned.place, whole) for member in planned.rows]
            yield planned, export_tensor(row, parts[0] if row.part is None else np.stack(parts))
            continue
        rows = max(1, BLOCK_BYTES // (math.prod(shape[1:]) * max(dtype.itemsize, info.dtype.itemsize)))
        # where several parameters have rows of one tensor, each ends where the next begins
        ends = [*(member.first_row for member in planned.rows[1:]), shape[0]]
        for member, end in zip(planned.rows, ends, strict=True):
            size = end - member.first_row
            for first in range(0, size, rows):
                foreign = (slice(first, min(first + rows, size)), *(slice(0, n) for n in shape[1:]))
                index = foreign if row.view is None else foreign[::-1]
                yield planned, export_tensor(member, _read(source, member, planned.place, index))


def _converted(source: TensorSource, blocks: Iterator[_Block]) -> Iterator[np.ndarray]:
    """The blocks cast to their dtypes, in smaller blocks of rows, as unsigned integers with the same bits."""
    for planned, rows in blocks:
        dtype = planned.dtype
        step = max(1, CAST_BYTES // (math.prod(rows.shape[1:]) * dtype.itemsize))
        for first in range(0, len(rows), step):
            converted = cast(rows[first : first + step], dtype, f"{source.where}: {_source_names(planned)}")
            if converted.ndim == 2 and not converted.flags.c_contiguous:
                matrix, converted = converted.T, np.empty(converted.shape, dtype)
                copy_transposed(converted, matrix)
            yield np.ascontiguousarray(converted).view(f"u{dtype.itemsize}")


def _source_names(planned: _OutputTensor) -> str:
    return ", ".join(f"params/{row.parameter}" for row in planned.rows)


def _read(source: TensorSource, row: Tensor, place: tuple[int, ...], index: Index) -> np.ndarray:
    """A slice of the parameter of one layer or expert. A bias without a foreign tensor is added to the rows of its
    matrix."""
    name, stack = f"params/{row.parameter}", tuple(slice(i, i + 1) for i in place)
    values = source.read(name, (*stack, *index))[(0,) * len(place)]
    if row.bias and f"params/{row.bias}" in source.tensors:
        bias = source.read(f"params/{row.bias}", (index[1],))
        # adding a zero bias would change the sign of negative zeros
        if bias.any():
            return values.astype(np.float32) + bias.astype(np.float32)
    return values


def cast(values: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """The values cast to `dtype`, rounded to nearest even.

    Raises:
        UserError: a finite value is too large for `dtype`.
    """
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast).all() and not np.array_equal(np.isfinite(cast), np.isfinite(values)):
        wider = options_to_add("--dtype", "bf16")
        raise UserError(f"{where} holds values too large for {dtype}: choose {wider} or fp32")
    return cast


def _json(value: dict[str, Any], *, sort_keys: bool = True) -> bytes:
    return json.dumps(value, indent=2, sort_keys=sort_keys).encode() + b"\n"
