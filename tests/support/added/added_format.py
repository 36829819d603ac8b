"""A format of checkpoints: a folder with arrays.npz, and the model in model.json."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.array_source import ArraySource

from mesh_transformer import files
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.identity import check_model
from mesh_transformer.checkpoint.tensors import TensorSource, UpdateCounts
from mesh_transformer.config import ModelConfig, strict_json


class ArraysFolder(StoredCheckpoint):
    """Each array by its name."""

    FORMAT = "arrays"

    @classmethod
    def find(cls, folder: Folder) -> ArraysFolder | None:
        return cls(folder) if "arrays.npz" in folder.names else None

    @property
    def recorded(self) -> Any:
        return {"model": strict_json.read_object(files.join(self.folder.path, "model.json"))}

    def source(self, model: ModelConfig) -> TensorSource:
        arrays = dict(np.load(files.join(self.folder.path, "arrays.npz")))
        source = ArraySource(arrays, UpdateCounts(0), {"config": self.recorded})
        check_model(source, model)
        return source
