"""A Hugging Face folder as a TensorSource, of any family that has a table of rows (families/spec.py).

config.json picks the family. The weights are safetensors or .bin, whole or in shards with an index.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from einops import rearrange
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from mesh_transformer import files
from mesh_transformer.checkpoint.hf import safetensors_file, torch_file
from mesh_transformer.checkpoint.hf.safetensors_file import copy_transposed
from mesh_transformer.checkpoint.identity import check_same_architecture
from mesh_transformer.checkpoint.tensors import Counts, FileTensor, Index, TensorInfo, parameter_shapes
from mesh_transformer.config import ModelConfig, strict_json
from mesh_transformer.errors import UserError
from mesh_transformer.families import FAMILIES
from mesh_transformer.families.base import ConfigJson
from mesh_transformer.families.spec import TRANSPOSED, Tensor

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16))
CACHE_BYTES = 1 << 30  # of the matrix that was read last
SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"


def read_model(folder: str) -> ModelConfig:
    """The architecture that a folder's config.json describes.

    Raises:
        UserError: config.json is missing or unreadable, or describes a model that we do not compute.
    """
    return _model(folder, _config(folder))


def _config(folder: str) -> dict[str, Any]:
    path = files.join(folder, "config.json")
    if not files.exists(path):
        raise UserError(f"{folder} is not a Hugging Face folder: it has no config.json")
    return strict_json.read_object(path)


def _model(folder: str, config: dict[str, Any]) -> ModelConfig:
    families = {family.HF_MODEL_TYPE: family for family in FAMILIES.values()}
    keys = ConfigJson(config)
    kind = keys.take("model_type", default=None)
    try:
        if not isinstance(kind, str) or kind not in families:
            raise UserError(f"model_type is {kind!r:.60}: only {', '.join(families)} can be read")
        model = families[kind].from_hf(keys)
        keys.refuse_rest()
    except ValidationError as error:
        raise UserError(f"{folder}/config.json: {'; '.join(map(_reason, error.errors()))}") from error
    except UserError as error:
        raise UserError(f"{folder}/config.json: {error}") from error
    return model


def _reason(detail: ErrorDetails) -> str:
    ours = detail.get("ctx", {}).get("error")
    return str(ours) if ours else f"model.{'.'.join(map(str, detail['loc']))}: {detail['msg']}"


class HFSource:
    """The weights of a folder, local or on gs://."""

    def __init__(self, folder: str, model: ModelConfig | None = None) -> None:
        """Read config.json and the headers, and check every name, shape and dtype. No tensor is read.

        With `model` the folder must hold that architecture; without, the architecture is the folder's own.

        Raises:
            UserError: the folder holds no model that we compute, is not of `model`, or is incomplete or damaged.
        """
        config = _config(folder)
        found = _model(folder, config)
        if model is not None:
            check_same_architecture(model, found, where=folder)
        self.where, self.model = folder, model or found
        self.counts, self.extra = Counts(0), dict[str, Any]()
        self._stored = open_tensors(folder)
        self._cached: tuple[FileTensor, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._shapes = parameter_shapes(self.model)
        self._rows = {f"params/{row.parameter}": row for row in self.model.hf_tensors()}
        if config.get("tie_word_embeddings") is True:
            for row in self._rows.values():
                if row.tied in self._stored:  # where both are there, transformers does not tie either
                    self._stored.setdefault(row.foreign, self._stored[row.tied])
        self._check_names()
        self.tensors: Mapping[str, TensorInfo] = dict(self._infos())

    def read(self, name: str, index: Index) -> np.ndarray:
        """See TensorSource; a bias that they lack and dead vocabulary rows are zeros."""
        shape, dtype = self.tensors[name]
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        out = np.zeros([max(0, s.stop - s.start) for s in bounds], dtype)
        row = self._rows.get(name)
        if row is None:
            return out
        if not row.stacked:
            self._fill(out, row, row.foreign, bounds)
            return out
        for one, layer in zip(out, range(bounds[0].start, bounds[0].stop), strict=True):
            self._fill(one, row, row.foreign.format(layer), bounds[1:])
        return out

    def _fill(self, out: np.ndarray, row: Tensor, theirs: str, bounds: Index) -> None:
        """Read one layer's slice into `out`; what lies beyond the vocabulary stays as it is."""
        shape = unpadded_shape(row, self.model)
        live = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(bounds, shape, strict=True))
        if any(s.start >= s.stop for s in live):
            return
        stored = self._stored[theirs]
        target = out[tuple(slice(0, s.stop - s.start) for s in live)]
        if row.view is None:
            target[...] = stored.read(live)
            if row.copy in self._stored and (self._stored[row.copy].read(live) != target).any():
                raise UserError(
                    f"{self.where}: {row.copy} is not {theirs}, but config.json ties them: set tie_word_embeddings to "
                    "false in it, as transformers reads such a folder"
                )
        elif row.view == TRANSPOSED:
            self._transpose(target, stored, *live)
        else:
            with self._lock:
                target[...] = import_tensor(row, self._whole(stored), shape)[live]

    def _transpose(self, out: np.ndarray, matrix: FileTensor, rows: slice, columns: slice) -> None:
        """Our rows and columns of a matrix of theirs, (columns, rows) in the file.

        For some of our rows all of it is read: whoever asks for them will ask for the others next, so it is kept.
        """
        if rows == slice(0, matrix.shape[1]) or matrix.n_bytes > CACHE_BYTES:
            for first, band in matrix.row_blocks(columns.start, columns.stop):
                at = first - columns.start
                copy_transposed(out[:, at : at + len(band)], band[:, rows])
            return
        with self._lock:
            copy_transposed(out, self._whole(matrix)[columns, rows])

    def _whole(self, matrix: FileTensor) -> np.ndarray:
        """All of a matrix, until the next is asked for, which takes its room: new room costs as much as reading."""
        if self._cached is None or self._cached[0] != matrix:
            room = self._cached[1] if self._cached else np.empty(0, np.uint8)
            self._cached = None
            if len(room) < matrix.n_bytes:
                del room  # before there is more
                room = np.empty(matrix.n_bytes, np.uint8)
            matrix.read_rows(0, _as_matrix(room, matrix))
            self._cached = matrix, room
        return _as_matrix(self._cached[1], matrix)

    def _check_names(self) -> None:
        """Every tensor that the config asks for is there, in its shape, and no other."""
        wanted = {}
        for row in self._rows.values():
            shape = foreign_shape(row, self.model)
            for name in [*self._names(row), *({row.copy} & self._stored.keys())]:
                if name not in self._stored:
                    layers = self.model.layers
                    raise UserError(f"{self.where}: {name} is missing ({layers} layers in config.json)")
                wanted[name] = shape
        for name, shape in wanted.items():
            stored = self._stored[name]
            if stored.shape != shape:
                raise UserError(f"{self.where}: {name} has shape {stored.shape}, expected {shape}")
            if stored.dtype not in FLOATS:
                raise UserError(
                    f"{self.where}: {name} is {stored.dtype}, expected one of {', '.join(map(str, FLOATS))}"
                )
        for name in self._stored:
            if name not in wanted and not re.fullmatch(self.model.HF_BUFFERS, name):
                raise UserError(
                    f"{self.where}: {name} is no tensor of {self.model.HF_ARCHITECTURE} with {self.model.layers} layers"
                )

    def _infos(self) -> Iterator[tuple[str, TensorInfo]]:
        for name, row in self._rows.items():
            dtypes = {self._stored[theirs].dtype for theirs in self._names(row)}
            if len(dtypes) > 1:
                kinds = " and ".join(sorted(map(str, dtypes)))
                raise UserError(
                    f"{self.where}: {row.foreign} is {kinds} in different layers: save it in one dtype"
                )
            yield name, TensorInfo(self._shapes[row.parameter], *dtypes)
            if row.bias:
                yield f"params/{row.bias}", TensorInfo(self._shapes[row.bias], *dtypes)

    def _names(self, row: Tensor) -> list[str]:
        layers = range(self.model.layers if row.stacked else 1)
        return [row.foreign.format(layer) for layer in layers]


def import_tensor(row: Tensor, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Our parameter, of one layer and of `shape`, from their tensor: with a view a copy, of our part alone."""
    if row.view is None:
        return theirs
    left, right = row.view.split("->")
    apart = rearrange(theirs, f"{left}->{re.sub('[()]', '', right)}", **row.sizes)
    return (apart if row.part is None else apart[row.part]).reshape(shape)


def export_tensor(row: Tensor, ours: np.ndarray) -> np.ndarray:
    """Their tensor, of one layer, from our parameter; of a row with a part from all parts, stacked in their order."""
    if row.view is None:
        return ours
    left, right = row.view.split("->")
    return rearrange(ours, f"{right}->{left}", **row.sizes)


def unpadded_shape(row: Tensor, model: ModelConfig) -> tuple[int, ...]:
    """The shape of our parameter, of one layer and without padding."""
    shape = list(parameter_shapes(model)[row.parameter][row.stacked :])
    if row.vocab_axis is not None:
        shape[row.vocab_axis] = model.n_vocab
    return tuple(shape)


def foreign_shape(row: Tensor, model: ModelConfig) -> tuple[int, ...]:
    """The shape of their tensor."""
    parts = () if row.part is None else (row.sizes["part"],)
    return export_tensor(row, np.broadcast_to(np.int8(0), (*parts, *unpadded_shape(row, model)))).shape


def weight_files(folder: str) -> list[str]:
    """Which of the four spellings the folder has, in the order in which transformers looks for them."""
    spellings = (SAFETENSORS, f"{SAFETENSORS}.index.json", BIN, f"{BIN}.index.json")
    there = set(files.list_dir(folder))
    return [name for name in spellings if name in there]


def open_tensors(folder: str) -> dict[str, FileTensor]:
    """Every tensor of a folder by its Hugging Face name. Only headers are read.

    Raises:
        UserError: there are no weights, a shard is missing or damaged, or the index leads out of the folder.
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
            raise UserError(f"{path} has {tensor} in {shard}, where it is not: a shard was exchanged?")
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def _weight_map(path: str, suffix: str) -> dict[str, str]:
    weight_map: Any = strict_json.read_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not shard.endswith(suffix) or {"/", "\\", "\0"} & set(shard):
            raise UserError(f"{path} names the shard {shard!r:.100}: expected a {suffix} file of this folder")
    return weight_map


def _open(folder: str, name: str) -> dict[str, FileTensor]:
    path = files.join(folder, name)
    if name.endswith(".safetensors"):
        return safetensors_file.read_header(path)
    return torch_file.read_tensors(path)


def _as_matrix(room: np.ndarray, matrix: FileTensor) -> np.ndarray:
    return room[: matrix.n_bytes].view(matrix.dtype).reshape(matrix.shape)
