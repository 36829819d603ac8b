"""Hugging Face folders, and the models on its hub."""

import functools
import json
import re
from typing import Any, Self

from mesh_transformer import hub
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.hf.config import parse_model, read_config
from mesh_transformer.checkpoint.origin import Origin, read_files
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, listed

_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")


def weights_of(folder: Folder) -> list[str]:
    """The names of the files with weights of a Hugging Face model in a folder."""
    return [name for name in folder.names if _WEIGHTS.fullmatch(name)]


class HFFolder(StoredCheckpoint):
    """A folder of transformers.

    Args:
        text_only: read the text model of a folder that holds a vision tower too.
    """

    FORMAT = "Hugging Face"

    def __init__(self, folder: Folder, *, text_only: bool = False):
        super().__init__(folder)
        self._text_only = text_only

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        weights = weights_of(folder)
        if weights and "config.json" not in folder.names:
            raise UserError(
                f"{folder.path} holds {listed(weights)} but no config.json: put config.json into the folder"
            )
        return cls(folder) if weights else None

    @functools.cached_property
    def config_json(self) -> dict[str, Any]:
        """Its config.json, or what that says about the text model.

        Raises:
            UserError: it is missing or unreadable, or has no text model besides others.
        """
        return read_config(self.folder.path, text_only=self._text_only)

    @functools.cached_property
    def model(self) -> ModelConfig:
        return parse_model(self.config_json, f"{self.folder.path}/config.json")

    @property
    def hf_folder(self) -> Folder | None:
        return self.folder

    def source(self, model: ModelConfig) -> TensorSource:
        # a server of native steps needs none of it
        from mesh_transformer.checkpoint.hf.source import HFSource

        return HFSource(self.folder.path, model, text_only=self._text_only, config=self.config_json)

    def origin(self, source: TensorSource) -> Origin | None:
        from mesh_transformer.checkpoint.hf.source import uniform_dtype

        contents = read_files(self.folder.path)
        if contents is None:
            return None
        if self._text_only:
            config = {**self.config_json, "architectures": [self.model.HF_ARCHITECTURE]}
            contents["config.json"] = json.dumps(config, indent=2).encode()
        return Origin(contents, uniform_dtype(source))


class HubModel(HFFolder):
    """A model on the hub, in the hub's cache. Its weights are downloaded when a source is asked for."""

    def __init__(self, folder: Folder, *, text_only: bool = False):
        super().__init__(Folder(hub.model_folder(folder.path, weights=False)), text_only=text_only)
        self._name = folder.path

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        return cls(folder) if hub.is_name(folder.path) else None

    def source(self, model: ModelConfig) -> TensorSource:
        # the hub's cache has the weights in the same folder
        hub.model_folder(self._name)
        return super().source(model)
