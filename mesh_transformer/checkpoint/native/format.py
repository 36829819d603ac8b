"""The steps of a run, and what a step says of itself."""

import functools
import itertools
from typing import Any, Self

from mesh_transformer import files
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.identity import check_model
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.native.manifest import Manifest
from mesh_transformer.checkpoint.native.source import COMMIT_MARKER, NativeSource, read_manifest
from mesh_transformer.checkpoint.origin import FOLDER, Origin, read_origin
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig


class NativeStep(StoredCheckpoint):
    """A step that `CheckpointStore` or `write_native` wrote."""

    FORMAT = "native"

    @classmethod
    def is_step(cls, folder: Folder) -> bool:
        finished = not files.is_remote(folder.path) or COMMIT_MARKER in folder.names
        return finished and {"state", "manifest"} <= set(folder.names)

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        newest_first = map(folder.inside, reversed(folder.steps))
        return next((cls(step) for step in itertools.chain([folder], newest_first) if cls.is_step(step)), None)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Its manifest.

        Raises:
            DamagedCheckpoint: the manifest is damaged or in an unknown format.
            UserError: the manifest is missing.
        """
        return read_manifest(self.folder.path)

    @property
    def recorded(self) -> Any:
        return self.manifest.extra.get("config")

    @property
    def hf_folder(self) -> Folder | None:
        return self.folder.inside(FOLDER) if FOLDER in self.folder.names else None

    def source(self, model: ModelConfig) -> TensorSource:
        source = NativeSource(self.folder.path, manifest=self.manifest)
        check_model(source, model)
        return source

    @property
    def has_base(self) -> bool:
        return self._record is not None

    @property
    def base(self) -> str:
        return super().base if self._record is None else self._record.base

    def adapters(self, model: ModelConfig) -> tuple[TensorSource, LoraRecord]:
        return super().adapters(model) if self._record is None else (self.source(model), self._record)

    @property
    def _record(self) -> LoraRecord | None:
        return LoraRecord.of(self.manifest.extra, self.folder.path)

    def origin(self, source: TensorSource) -> Origin | None:
        return None if self.hf_folder is None else read_origin(self.folder.path, source.extra)
