"""A Hugging Face folder of GPTJForCausalLM as a TensorSource. hf_layout.py says which tensor is what."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mesh_transformer.checkpoint.file_tensor import FileTensor
from mesh_transformer.checkpoint.hf_config import is_tied, model_config_from_hf
from mesh_transformer.checkpoint.hf_files import open_tensors
from mesh_transformer.checkpoint.hf_layout import EMBEDDING, EMBEDDING_BIAS, Entry, entries, padded
from mesh_transformer.checkpoint.identity import check_same
from mesh_transformer.checkpoint.tensors import Counts, Index, TensorInfo
from mesh_transformer.checkpoint.transpose import copy_transposed
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16))
HELD_BYTES = 1 << 30  # of the matrix that was read last
TABLE, HEAD = "transformer.wte.weight", "lm_head.weight"
_BUFFERS = re.compile(
    r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)"
)  # in files before 2023


class HFSource:
    """The weights of a folder with config.json and safetensors or .bin files, local or on gs://."""

    def __init__(self, folder: str, model: ModelConfig | None = None) -> None:
        """Read config.json and the headers, and check every name, shape and dtype. No tensor is read.

        With `model` the folder must hold that architecture; without, the architecture is the folder's own.

        Raises:
            UserError: the folder is no GPT-J that we compute, is not that of `model`, or is incomplete or damaged.
        """
        found = model_config_from_hf(folder)
        if model is not None:
            check_same(model, found, where=folder)
        self.where, self.model = folder, model or found
        self.counts, self.extra = Counts(0), dict[str, Any]()
        self._stored = open_tensors(folder)
        if is_tied(folder) and HEAD not in self._stored and TABLE in self._stored:
            self._stored[HEAD] = self._stored[TABLE]  # where both are there, transformers does not tie either
        self._held: tuple[FileTensor, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._entries = {entry.name: entry for entry in entries(self.model)}
        self._check_names()
        infos = {name: self._info(entry) for name, entry in self._entries.items()}
        bias = TensorInfo((self.model.d_model,), infos[EMBEDDING].dtype)
        self.tensors: Mapping[str, TensorInfo] = {**infos, EMBEDDING_BIAS: bias}

    def read(self, name: str, index: Index) -> np.ndarray:
        """See TensorSource; the embedding's bias and dead vocabulary rows are zeros."""
        shape, dtype = self.tensors[name]
        bounds = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, shape, strict=True))
        out = np.zeros([max(0, s.stop - s.start) for s in bounds], dtype)
        if name == EMBEDDING_BIAS:
            return out
        entry = self._entries[name]
        if entry.stacked:
            for row, layer in zip(out, range(bounds[0].start, bounds[0].stop), strict=True):
                self._fill(row, entry, layer, bounds[1:])
        else:
            self._fill(out, entry, 0, bounds)
        return out

    def _fill(self, out: np.ndarray, entry: Entry, layer: int, bounds: Index) -> None:
        """Read one layer's slice into `out`; what lies beyond the vocabulary stays as it is."""
        live = tuple(slice(s.start, min(s.stop, n)) for s, n in zip(bounds, entry.shape, strict=True))
        if any(s.start >= s.stop for s in live):
            return
        stored = self._stored[entry.hf.format(layer)]
        target = out[tuple(slice(0, s.stop - s.start) for s in live)]
        if entry.transposed:
            self._transpose(target, stored, *live)
        else:
            target[...] = stored.read(live)

    def _transpose(self, out: np.ndarray, matrix: FileTensor, rows: slice, columns: slice) -> None:
        """Our rows and columns of a matrix of theirs, (columns, rows) in the file.

        For some of our rows all of it is read: whoever asks for them will ask for the others next, so it is kept.
        """
        if rows == slice(0, matrix.shape[1]) or matrix.n_bytes > HELD_BYTES:
            for first, band in matrix.bands(columns.start, columns.stop):
                at = first - columns.start
                copy_transposed(out[:, at : at + len(band)], band[:, rows])
            return
        with self._lock:
            copy_transposed(out, self._whole(matrix)[columns, rows])

    def _whole(self, matrix: FileTensor) -> np.ndarray:
        """All of a matrix, until the next is asked for, which takes its room: new room costs as much as reading."""
        if self._held is None or self._held[0] != matrix:
            room = self._held[1] if self._held else np.empty(0, np.uint8)
            self._held = None
            if len(room) < matrix.n_bytes:
                del room  # before there is more
                room = np.empty(matrix.n_bytes, np.uint8)
            matrix.read_rows(0, _as_matrix(room, matrix))
            self._held = matrix, room
        return _as_matrix(self._held[1], matrix)

    def _check_names(self) -> None:
        """Every tensor that the config asks for is there, and no other."""
        wanted: dict[str, Entry] = {}
        for entry in self._entries.values():
            for layer in range(self.model.layers if entry.stacked else 1):
                name = entry.hf.format(layer)
                if name not in self._stored:
                    raise UserError(
                        f"{self.where}: {name} is missing ({self.model.layers} layers according to config.json)"
                    )
                wanted[name] = entry
        for name, entry in wanted.items():
            self._check(name, self._stored[name], entry)
        strange = [name for name in self._stored if name not in wanted and not _BUFFERS.fullmatch(name)]
        if strange:
            raise UserError(
                f"{self.where}: {strange[0]} is no tensor of GPTJForCausalLM with {self.model.layers} layers"
            )

    def _check(self, name: str, stored: FileTensor, entry: Entry) -> None:
        if stored.shape != entry.hf_shape:
            raise UserError(f"{self.where}: {name} has shape {stored.shape}, expected {entry.hf_shape}")
        if stored.dtype not in FLOATS:
            raise UserError(
                f"{self.where}: {name} is {stored.dtype}, expected one of {', '.join(map(str, FLOATS))}"
            )

    def _info(self, entry: Entry) -> TensorInfo:
        layers = range(self.model.layers if entry.stacked else 1)
        dtypes = {self._stored[entry.hf.format(layer)].dtype for layer in layers}
        if len(dtypes) > 1:
            kinds = " and ".join(sorted(map(str, dtypes)))
            raise UserError(f"{self.where}: {entry.hf} is {kinds} in different layers: save it in one dtype")
        return TensorInfo(padded(entry, self.model), dtypes.pop())


def _as_matrix(room: np.ndarray, matrix: FileTensor) -> np.ndarray:
    return room[: matrix.n_bytes].view(matrix.dtype).reshape(matrix.shape)
