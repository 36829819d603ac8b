"""Which form of checkpoint a path holds, told by what lies there."""

from __future__ import annotations

import enum
import re
from typing import Any, NamedTuple

from mesh_transformer import files
from mesh_transformer.checkpoint import classic_folder
from mesh_transformer.errors import UserError

COMMIT_MARKER = "commit_success.txt"
SHOWN = 8  # names listed in an error message
_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")


class Form(enum.Enum):
    """The forms that can be read."""

    NATIVE = "native"
    CLASSIC = "classic"
    HUGGING_FACE = "Hugging Face"


class Found(NamedTuple):
    """A checkpoint: of native and classic ones the step folder."""

    form: Form
    folder: str


class ClassicRun(NamedTuple):
    """A run of the original program: its newest step, and what its meta.json notes of that step."""

    folder: str
    aux: dict[str, Any]


def recognise(path: str) -> Found:
    """The checkpoint at `path`: a step folder, a run's folder (its newest step) or a Hugging Face folder.

    In a folder with native and classic steps the native ones count: a classic run was gone on with.

    Raises:
        UserError: there is none, or one of a layout that is not read; the message lists what is there.
    """
    path = path.rstrip("/") or "/"
    names = files.list_dir(path)
    if is_native_step(path, names):
        return Found(Form.NATIVE, path)
    if native := [name for name in _step_names(names) if is_native_step(files.join(path, name))]:
        return Found(Form.NATIVE, files.join(path, native[-1]))
    if any(re.fullmatch(r"(shard|step)_\d+|params", name) for name in names) and (
        classic := classic_folder.find_step(path)
    ):
        return Found(Form.CLASSIC, classic)
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    if weights and "config.json" not in names:
        raise UserError(f"{path} holds {_some(weights)} but no config.json: put it back beside the weights")
    if weights:
        return Found(Form.HUGGING_FACE, path)
    raise UserError(
        f"no checkpoint in {path}: expected a run's folder or one of its step_N folders, a classic step_N folder "
        f"with shard_0 in it, or a Hugging Face folder with config.json and weights; found {_some(names)}"
    )


def classic_run(root: str) -> ClassicRun | None:
    """The run of the original program that `root` holds, or None if there is no classic step in it.

    Raises:
        UserError: there are classic steps, and no meta.json that names one of them.
    """
    if not any(is_classic_step(files.join(root, name)) for name in _step_names(files.list_dir(root))):
        return None
    meta = classic_folder.read_meta(root)
    if meta is None:
        raise UserError(
            f"{root} holds steps of the original program but not its meta.json, so that its run cannot go on: put "
            f"meta.json back, or start from one step with --tune-model-path and another checkpoint.model_dir"
        )
    folder = classic_folder.find_step(root, meta.step)
    aux = meta.aux.get(str(meta.step))
    return ClassicRun(folder or root, aux if isinstance(aux, dict) else {})


def finished_steps(root: str) -> list[str]:
    """The names of the native and classic steps right under `root`, ascending."""
    folders = ((name, files.join(root, name)) for name in _step_names(files.list_dir(root)))
    return [name for name, folder in folders if is_native_step(folder) or is_classic_step(folder)]


def is_classic_step(folder: str) -> bool:
    """Whether a step folder is of the original program."""
    return any(re.fullmatch(r"shard_\d+", name) for name in files.list_dir(folder))


def is_native_step(folder: str, names: list[str] | None = None) -> bool:
    """Whether a folder, with `names` in it, is a native step that was finished."""
    inside = set(files.list_dir(folder) if names is None else names)
    return {"state", "manifest"} <= inside and (not files.is_remote(folder) or COMMIT_MARKER in inside)


def _step_names(names: list[str]) -> list[str]:
    """The step_N among names, ascending by N."""
    steps = [name for name in names if re.fullmatch(r"step_\d+", name)]
    return sorted(steps, key=lambda name: int(name.removeprefix("step_")))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) or "nothing"
