"""The runs and steps of the original program."""

import functools
import re
from typing import Any, NamedTuple, Self

from mesh_transformer.checkpoint.classic import folder as layout
from mesh_transformer.checkpoint.format import Folder, StoredCheckpoint
from mesh_transformer.checkpoint.identity import check_model
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError


class ClassicStep(StoredCheckpoint):
    """A step of the original program, or one of its format that this program wrote."""

    FORMAT = "classic"

    @classmethod
    def is_step(cls, folder: Folder) -> bool:
        return layout.has_shards(folder.names)

    @classmethod
    def find(cls, folder: Folder) -> Self | None:
        """The step that a folder is, or of a run the step of meta.json, else the newest.

        Raises:
            UserError: meta.json names a step that does not exist, or the checkpoint is of the V2 model.
        """
        inside = folder.inside("params").names if "params" in folder.names else []
        if any(re.fullmatch(r"shard_\d+\.npz", name) for name in inside):
            raise UserError(layout.explain_v2(folder.path))
        if "shard_0" in folder.names:
            return cls(folder)
        steps = [n for n in layout.step_numbers(folder.names) if "shard_0" in folder.inside(f"step_{n}").names]
        if not steps:
            return None
        meta = layout.read_meta(folder.path)
        step = steps[-1] if meta is None else meta.step
        if step not in steps:
            raise UserError(f"no classic checkpoint of step {step} in {folder.path}: available are {steps}")
        return cls(folder.inside(f"step_{step}"))

    @functools.cached_property
    def recorded(self) -> Any:
        return layout.read_config(self.folder.path)

    def source(self, model: ModelConfig) -> TensorSource:
        # most commands read no classic checkpoint
        from mesh_transformer.checkpoint.classic.source import ClassicSource

        source = ClassicSource(self.folder.path, model, recorded=self.recorded)
        check_model(source, model)
        return source


class ClassicRun(NamedTuple):
    """A run of the original program: the folder of its newest step, and the step's entry `aux` in meta.json."""

    folder: str
    aux: dict[str, Any]


def classic_run(root: str) -> ClassicRun | None:
    """The run of the original program in `root`; None if `root` holds no classic step.

    Raises:
        UserError: `root` holds classic steps, but no meta.json that names one of them.
    """
    folder = Folder(root)
    if not any(ClassicStep.is_step(folder.inside(name)) for name in folder.steps):
        return None
    meta = layout.read_meta(root)
    if meta is None:
        raise UserError(
            f"{root} holds steps of the original program but not its meta.json, so the run cannot be resumed: restore "
            f"meta.json, or start from one step with --tune-model-path and another checkpoint.model_dir"
        )
    step = ClassicStep.find(folder)
    aux = meta.aux.get(str(meta.step))
    return ClassicRun(root if step is None else step.folder.path, aux if isinstance(aux, dict) else {})
