"""A Hugging Face folder of GPTJForCausalLM as a TensorSource. hf_layout.py says which tensor is what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mesh_transformer.checkpoint.hf_config import check_same, is_tied, model_config_from_hf
from mesh_transformer.checkpoint.hf_files import StoredTensor, open_tensors
from mesh_transformer.checkpoint.hf_layout import EMBEDDING, EMBEDDING_BIAS, Entry, entries, padded
from mesh_transformer.checkpoint.tensors import Counts, Index, TensorInfo
from mesh_transformer.checkpoint.transpose import copy_transposed
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError

FLOATS = tuple(np.dtype(kind) for kind in (np.float32, ml_dtypes.bfloat16, np.float16))
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
            copy_transposed(target, stored.read(live[::-1]))
        else:
            target[...] = stored.read(live)

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

    def _check(self, name: str, stored: StoredTensor, entry: Entry) -> None:
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
