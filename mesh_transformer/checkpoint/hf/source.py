"""Reads a Hugging Face folder of any family with a table of tensors (spec/decoder.py).

The weights are safetensors or .bin files, in one file or in shards with an index.
"""

import itertools
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from einops import rearrange

from mesh_transformer import files
from mesh_transformer.checkpoint.hf import safetensors_file, torch_file
from mesh_transformer.checkpoint.hf.config import parse_model, read_config
from mesh_transformer.checkpoint.hf.fused_experts import split_experts
from mesh_transformer.checkpoint.hf.safetensors_file import copy_transposed
from mesh_transformer.checkpoint.hf.text_only import text_tensors
from mesh_transformer.checkpoint.identity import check_same_architecture, with_model
from mesh_transformer.checkpoint.tensors import (
    FileTensor,
    Index,
    RowTensor,
    TensorInfo,
    TensorSource,
    UpdateCounts,
    parameter_shapes,
    unpadded_shape,
)
from mesh_transformer.config import ModelConfig, strict_json
from mesh_transformer.errors import UserError
from mesh_transformer.families.experts import WithExperts
from mesh_transformer.logs import log
from mesh_transformer.models.feed_forward import is_router
from mesh_transformer.spec import TRANSPOSED, Tensor, by_stack

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16, np.float64))
# the largest matrix to cache; only the last one that was read is cached
CACHE_BYTES = 1 << 30
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"

# prefixes that torch.compile and DataParallel give to the names of a model
_WRAPPERS = re.compile(r"(?:^|\.)(_orig_mod\.|module\.)")


class HFSource:
    """The weights in a folder, local or `gs://`, as a `TensorSource`."""

    def __init__(
        self,
        folder: str,
        model: ModelConfig | None = None,
        *,
        text_only: bool = False,
        config: dict[str, Any] | None = None,
    ) -> None:
        """Read config.json and the headers, and check every name, shape and dtype. Reads no tensor.

        Args:
            model: the architecture that the folder must have; None: any.
            text_only: read the text model of a folder that holds a vision tower too.
            config: what `read_config` returns, if it has been read.

        Raises:
            UserError: the model is not supported or differs from `model`, or the folder is incomplete or damaged.
        """
        config = read_config(folder, text_only=text_only) if config is None else config
        recorded = parse_model(config, f"{folder}/config.json")
        if model is not None:
            check_same_architecture(model, recorded, where=folder)
        stored = open_tensors(folder)
        if text_only:
            stored = text_tensors(stored, folder)
        if isinstance(recorded, WithExperts):
            stored = split_experts(stored, recorded, folder)
        # of a text model beside others, transformers reads the key beside its config
        tied = (read_config(folder) if text_only else config).get("tie_word_embeddings") is True
        self._set_up(folder, model or recorded, recorded, _full_names(stored, recorded), tied=tied)

    def _set_up(
        self, where: str, model: ModelConfig, recorded: ModelConfig, stored: Mapping[str, RowTensor], *, tied: bool
    ) -> None:
        """Check the tensors of a model.

        Args:
            recorded: the model that the files describe.
            stored: by the names of `hf_tensors`.
            tied: the table of tokens may be the head.
        """
        self.where, self.model = where, model
        self.counts, self.extra = UpdateCounts(0), with_model({}, recorded)
        self._stored = dict(stored)
        self._cached: tuple[RowTensor, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._shapes = parameter_shapes(self.model)
        self._rows = {f"params/{row.parameter}": row for row in stacked_rows(self.model)}
        self._tie(tied)
        self._check_names()
        self.tensors: Mapping[str, TensorInfo] = dict(self._infos())

    def read(self, name: str, index: Index) -> np.ndarray:
        """See `TensorSource`. A bias without a tensor in the folder, and the padding of the vocabulary, are zero."""
        shape, dtype = self.tensors[name]
        index = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        out = np.zeros([max(0, s.stop - s.start) for s in index], dtype)
        row = self._rows.get(name)
        if row is None:
            return out
        stack, inside = index[: row.stack_rank], index[row.stack_rank :]
        for place in itertools.product(*(range(s.start, s.stop) for s in stack)):
            at = tuple(i - s.start for i, s in zip(place, stack, strict=True))
            self._fill(out[at], row, row.name(place), inside)
        return out

    def _tie(self, tied: bool) -> None:
        """Let the table of tokens and the head be one tensor, of which a file may have either.

        If the folder has both tensors, transformers does not tie them either.
        """
        for row in self._rows.values():
            other = row.copy or (row.tied if tied else None)
            if other is None:
                continue
            if other in self._stored:
                self._stored.setdefault(row.foreign, self._stored[other])
            elif row.tied is not None and row.foreign in self._stored:
                self._stored[row.tied] = self._stored[row.foreign]

    def _fill(self, out: np.ndarray, row: Tensor, name: str, index: Index) -> None:
        """Read a slice of the tensor `name` into `out`. Does not write the padding of the vocabulary."""
        shape = unpadded_shape(row, self.model)
        unpadded = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(index, shape, strict=True))
        if any(s.start >= s.stop for s in unpadded):
            return
        stored = self._stored[name]
        target = out[tuple(slice(0, s.stop - s.start) for s in unpadded)]
        if row.view is None:
            target[...] = stored.read((_shifted(unpadded[0], row.first_row), *unpadded[1:]))
            # both as they are read: a file may have wider numbers
            if (
                row.copy in self._stored
                and (self._stored[row.copy].read(unpadded).astype(target.dtype) != target).any()
            ):
                raise UserError(
                    f"{self.where}: {row.copy} differs from {name}, but config.json ties them: set tie_word_embeddings "
                    "to false in config.json, as transformers reads such a folder"
                )
        elif row.view == TRANSPOSED:
            rows, columns = unpadded
            self._transpose(target, stored, rows, _shifted(columns, row.first_row))
        else:
            with self._lock:
                target[...] = import_tensor(row, self._whole(stored), shape)[unpadded]

    def _transpose(self, out: np.ndarray, matrix: RowTensor, rows: slice, columns: slice) -> None:
        """Read rows and columns of the transpose of `matrix`, which is (columns, rows) in the file.

        A request for only some rows reads the whole matrix and caches it, because requests for the other rows follow.
        """
        if rows == slice(0, matrix.shape[1]) or matrix.n_bytes > CACHE_BYTES:
            for first, block in matrix.row_blocks(columns.start, columns.stop):
                at = first - columns.start
                copy_transposed(out[:, at : at + len(block)], block[:, rows])
            return
        with self._lock:
            copy_transposed(out, self._whole(matrix)[columns, rows])

    def _whole(self, matrix: RowTensor) -> np.ndarray:
        """A whole matrix. The next call reuses its memory: allocating new memory takes as long as reading the
        matrix."""
        if self._cached is None or self._cached[0] != matrix:
            buffer = self._cached[1] if self._cached else np.empty(0, np.uint8)
            self._cached = None
            if len(buffer) < matrix.n_bytes:
                # frees the old memory first
                del buffer
                buffer = np.empty(matrix.n_bytes, np.uint8)
            matrix.read_rows(0, _as_matrix(buffer, matrix))
            self._cached = matrix, buffer
        return _as_matrix(self._cached[1], matrix)

    def _missing(self, name: str | None) -> UserError:
        for stored in self._stored:
            if match := _WRAPPERS.search(stored):
                return UserError(
                    f"{self.where}: names of tensors have the prefix {match[1]!r}, as in "
                    f"{stored[match.start(1) :]:.200}: save the model inside of the wrapper, or remove the prefix"
                )
        return UserError(f"{self.where}: {name} is missing (the model has {self.model.layers} layers)")

    def _check_names(self) -> None:
        """Check that the folder has every tensor of the model, with its shape, and no other."""
        expected = {}
        for row in self._rows.values():
            shape = foreign_shape(row, self.model)
            names = (name for _, name in foreign_names(row, self.model))
            for name in itertools.chain(names, {row.copy} & self._stored.keys()):
                if name not in self._stored:
                    raise self._missing(name)
                expected[name] = shape
        for name, shape in expected.items():
            stored = self._stored[name]
            if stored.shape != shape:
                raise UserError(f"{self.where}: {name} has shape {stored.shape}, expected {shape}")
            if stored.dtype not in FLOATS:
                raise UserError(
                    f"{self.where}: {name} is {stored.dtype}, expected one of {', '.join(map(str, FLOATS))}"
                )
        unused = self.model.hf_unused(self._stored)
        for name in self._stored:
            if name not in expected and name not in unused:
                raise UserError(
                    f"{self.where}: {name} is not a tensor of {self.model.HF_ARCHITECTURE} with {self.model.layers} "
                    "layers"
                )

    def _infos(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, row in self._rows.items():
            dtypes = {self._stored[foreign].dtype for _, foreign in foreign_names(row, self.model)}
            dtype = _common_dtype(dtypes)
            if dtypes != {dtype}:
                kinds = " and ".join(sorted(map(str, dtypes)))
                log.warning("%s: %s is %s: it is read as %s", self.where, row.foreign, kinds, dtype)
            yield name, TensorInfo(self._shapes[row.parameter], dtype)
            if row.bias:
                yield f"params/{row.bias}", TensorInfo(self._shapes[row.bias], dtype)


def _common_dtype(dtypes: Collection[np.dtype]) -> np.dtype:
    """The dtype of a stack whose layers have these dtypes: float32 for several, and for float64."""
    widest = np.dtype(np.float32)
    return widest if len(dtypes) > 1 else min(*dtypes, widest, key=lambda dtype: dtype.itemsize)


def _shifted(index: slice, by: int) -> slice:
    return slice(index.start + by, index.stop + by)


def _full_names(stored: dict[str, FileTensor], model: ModelConfig) -> dict[str, FileTensor]:
    """The tensors with the names of the whole model. A file of the model without its head, such as gpt2's on the hub,
    has names without the first part."""
    if any(name.startswith(model.HF_PREFIX) for name in stored):
        return stored
    whole = {row.foreign for row in model.hf_tensors()}
    return {name if name in whole else model.HF_PREFIX + name: tensor for name, tensor in stored.items()}


def stacked_rows(model: ModelConfig) -> list[Tensor]:
    """The rows of the Hugging Face format, one for each stack of the model's parameters."""
    return by_stack(model.hf_tensors(), model.decoder())


def uniform_dtype(source: TensorSource) -> np.dtype | None:
    """The stored dtype of the parameters but the exact ones; None if their dtypes differ."""
    dtypes = {info.dtype for name, info in source.tensors.items() if name.startswith("params/") and not exact(name)}
    return dtypes.pop() if len(dtypes) == 1 else None


def exact(name: str) -> bool:
    """Whether no export rounds a parameter, as transformers does not: a rounded bias of a router chooses other
    experts."""
    module, _, leaf = name.rpartition("/")
    return leaf == "bias" and is_router(module)


def import_tensor(row: Tensor, foreign: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert a foreign tensor to its part of the parameter, of `shape`. With a view, the result is a copy."""
    if row.view is None:
        return foreign
    left, right = row.view.split("->")
    parts = rearrange(foreign, f"{left}->{re.sub('[()]', '', right)}", **row.sizes)
    return (parts if row.part is None else parts[row.part]).reshape(shape)


def export_tensor(row: Tensor, parameter: np.ndarray) -> np.ndarray:
    """Convert a part of the parameter to its foreign tensor; for a row with a part, all parts stacked in order."""
    if row.view is None:
        return parameter
    left, right = row.view.split("->")
    return rearrange(parameter, f"{right}->{left}", **row.sizes)


def foreign_names(row: Tensor, model: ModelConfig) -> Iterator[tuple[tuple[int, ...], str]]:
    """The names of a row's foreign tensors, each after the index of its layer and expert in the parameter.

    One at a time: a config.json may give any number of experts.
    """
    return ((place, row.name(place)) for place in _places(parameter_shapes(model)[row.parameter][: row.stack_rank]))


def _places(stack: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All indices of an array of this shape, in order."""
    if not stack:
        yield ()
        return
    for first in range(stack[0]):
        for rest in _places(stack[1:]):
            yield first, *rest


def foreign_shape(row: Tensor, model: ModelConfig) -> tuple[int, ...]:
    """The shape of the foreign tensor."""
    parts = () if row.part is None else (row.sizes["part"],)
    shape = export_tensor(row, np.broadcast_to(np.int8(0), (*parts, *unpadded_shape(row, model)))).shape
    return shape if row.of_rows is None else (row.of_rows, *shape[1:])


def weight_files(folder: str) -> list[str]:
    """Which of the four file names of weights the folder has, in the order in which transformers looks for them."""
    names = (SAFETENSORS, f"{SAFETENSORS}.index.json", BIN, f"{BIN}.index.json")
    existing = set(files.list_dir(folder))
    return [name for name in names if name in existing]


def open_tensors(folder: str) -> dict[str, FileTensor]:
    """Every tensor of a folder by its Hugging Face name. Reads only headers.

    Raises:
        UserError: the folder has no weights, a shard is missing or damaged, or the index names an outside file.
    """
    found = weight_files(folder)
    if not found:
        raise UserError(f"no weights in {folder}: expected {SAFETENSORS} or {BIN}, or an index of shards")
    name = found[0]
    if not name.endswith(".index.json"):
        return _open(folder, name)
    path = files.join(folder, name)
    weight_map = _weight_map(path, ".safetensors" if name.startswith(SAFETENSORS) else ".bin")
    shards = {shard: _open(folder, shard) for shard in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise UserError(
                f"{path} lists {tensor} in {shard}, which does not hold it: the shard may be from another checkpoint"
            )
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def _weight_map(path: str, suffix: str) -> dict[str, str]:
    weight_map: Any = strict_json.read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not shard.endswith(suffix) or {"/", "\\", "\0"} & set(shard):
            raise UserError(f"{path} names the shard {shard!r:.100}: expected a {suffix} file in this folder")
    return weight_map


def _open(folder: str, name: str) -> dict[str, FileTensor]:
    path = files.join(folder, name)
    if name.endswith(".safetensors"):
        return safetensors_file.read_header(path)
    return torch_file.read_tensors(path)


def _as_matrix(buffer: np.ndarray, matrix: RowTensor) -> np.ndarray:
    return buffer[: matrix.n_bytes].view(matrix.dtype).reshape(matrix.shape)
