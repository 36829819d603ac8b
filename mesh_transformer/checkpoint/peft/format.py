"""Folders of PEFT, local, `gs://` or on the hub."""

import functools
import os
import re
from typing import TYPE_CHECKING, Self

from mesh_transformer import files, hub
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError

if TYPE_CHECKING:
    from mesh_transformer.checkpoint.peft.config import AdapterConfig

# the rest is imported where it is used: commands without adapters need none of it

# what unsloth calls the 4-bit copy of a model
_FOUR_BITS = "-bnb-4bit"
# gpt2 and others of the hub have no organization
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+/")


class PeftFolder(StoredCheckpoint):
    """Adapters of a base, which has the model, its config and, if the folder has none, the tokenizer."""

    FORMAT = "PEFT"
    DESCRIBED_BY_BASE = True

    def __init__(self, folder: Folder, path: str):
        super().__init__(folder)
        self._path = path

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        local = folder
        if hub.is_name(folder.path):
            if hub.gguf_file(folder.path) is not None:
                return None
            local = Folder(hub.description_folder(folder.path))
        return cls(local, folder.path) if hub.ADAPTER_CONFIG in local.names else None

    @functools.cached_property
    def adapter_config(self) -> "AdapterConfig":
        """Its adapter_config.json."""
        from mesh_transformer.checkpoint.peft.config import read_adapter_config

        return read_adapter_config(self.folder.path)

    @property
    def has_base(self) -> bool:
        return True

    @property
    def base(self) -> str:
        name, where = self.adapter_config.base, self.adapter_config.where
        if name is None:
            raise UserError(f"{where} names no base: give the base with --ckpt BASE --adapter {self._path}")
        if name.endswith(_FOUR_BITS):
            raise UserError(
                f"{where} has the base {name:.200}, a model in 4 bits of bitsandbytes, which is not read: give the "
                f"float model with --ckpt BASE --adapter {self._path}"
            )
        path = hub.as_name(name) or name
        if not os.path.exists(name) and _HUB_NAME.fullmatch(name):
            path = f"{hub.PREFIX}{name}"
        if hub.is_name(path) and self.adapter_config.revision and "@" not in path:
            path = f"{path}@{self.adapter_config.revision}"
        if files.is_remote(path) and not _BUCKET.match(path):
            raise UserError(f"{where} has the base {path}, which is no path of gs://: give the base with --ckpt")
        return path

    def adapters(self, model: ModelConfig) -> tuple[TensorSource, LoraRecord]:
        from mesh_transformer.checkpoint.peft.pairs import read_pairs
        from mesh_transformer.checkpoint.peft.source import PeftSource

        if hub.is_name(self._path):
            # the hub's cache has it in the same folder
            hub.adapter_folder(self._path)
        folder = self.folder.path
        source = PeftSource(folder, read_pairs(folder), self.adapter_config, model)
        return source, source.record
