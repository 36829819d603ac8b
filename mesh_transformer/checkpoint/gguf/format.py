"""GGUF files, local, `gs://` or on the hub."""

import functools
import json
from typing import Any, Self

import numpy as np

from mesh_transformer import files, hub
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.origin import Origin
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.gguf.header import Header, has_magic
from mesh_transformer.gguf.parts import open_parts
from mesh_transformer.logs import log

# the rest is imported where it is used: a server of native steps needs none of it


class GgufFile(StoredCheckpoint):
    """A model in a GGUF file. The first four bytes decide, not its name: Ollama's files have none."""

    FORMAT = "GGUF"

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        path = folder.path
        if hub.is_name(path):
            return cls(folder) if hub.gguf_file(path) is not None else None
        if files.is_remote(path) and not path.endswith(".gguf"):
            return None
        return cls(folder) if files.is_file(path) and has_magic(path) else None

    @functools.cached_property
    def header(self) -> Header:
        """The header of all parts. A file on the hub is downloaded."""
        return open_parts(hub.downloaded_gguf(self.folder.path) if hub.is_name(self.folder.path) else self.folder.path)

    @functools.cached_property
    def model(self) -> ModelConfig:
        from mesh_transformer.checkpoint.gguf.model import parse_model

        return parse_model(self.header)

    @property
    def tokenizer(self) -> str | None:
        return self.folder.path

    @property
    def generation_config(self) -> dict[str, Any]:
        from mesh_transformer.gguf.tokens import generation_config

        return generation_config(self.header)

    def source(self, model: ModelConfig) -> TensorSource:
        from mesh_transformer.checkpoint.gguf.source import GgufSource

        return GgufSource(self.header, self.model, model)

    def origin(self, source: TensorSource) -> Origin | None:
        from mesh_transformer.checkpoint.hf.source import uniform_dtype
        from mesh_transformer.checkpoint.hf.writer import config_json
        from mesh_transformer.gguf.tokens import generation_config, tokenizer_beside

        dtype = uniform_dtype(source) or np.dtype(np.float32)
        ends = generation_config(self.header)
        config = config_json(self.model, dtype) | {key: ends.get(key) for key in ("bos_token_id", "eos_token_id")}
        contents = {
            "config.json": json.dumps(config, indent=2).encode(),
            "generation_config.json": json.dumps(ends, indent=2).encode(),
        }
        try:
            contents |= tokenizer_beside(self.header, hub.TOKENIZER_FILES)
        # the user may name another
        except UserError as error:
            log.warning("%s; what is written has no tokenizer", error)
        return Origin(contents, dtype)
