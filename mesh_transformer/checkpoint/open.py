"""Detects the format of a checkpoint by the contents of its folder, and opens it."""

import enum
import re
from typing import Any, NamedTuple

from mesh_transformer import files, hub
from mesh_transformer.checkpoint import origin
from mesh_transformer.checkpoint.classic import folder as classic_folder
from mesh_transformer.checkpoint.classic.source import ClassicSource
from mesh_transformer.checkpoint.hf.config import read_model
from mesh_transformer.checkpoint.hf.source import HFSource, uniform_dtype
from mesh_transformer.checkpoint.identity import check_model, recorded_model
from mesh_transformer.checkpoint.native.source import COMMIT_MARKER, NativeSource, read_manifest
from mesh_transformer.checkpoint.origin import Origin
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, listed

_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")


class Format(enum.Enum):
    """The formats that can be read."""

    NATIVE = "native"
    CLASSIC = "classic"
    HUGGING_FACE = "Hugging Face"


class CheckpointFolder(NamedTuple):
    """The format and the path of a checkpoint. The path of a native or classic checkpoint is its step folder."""

    format: Format
    path: str


class ClassicRun(NamedTuple):
    """A run of the original program: the folder of its newest step, and the step's entry `aux` in meta.json."""

    folder: str
    aux: dict[str, Any]


def find_checkpoint(path: str, *, weights: bool = True) -> CheckpointFolder:
    """The checkpoint at `path`: a step folder, a run's folder (its newest step), a Hugging Face folder or a name on its
    hub, hf://ORG/NAME[@REVISION].

    In a folder with native and classic steps the newest native step is used: a native run resumed from the classic one.

    Args:
        weights: False: from the hub, download only the files that describe the model.

    Raises:
        UserError: there is no checkpoint, or its layout is not supported; the message lists the folder's contents. Or
            the hub has no such model, or cannot be reached.
    """
    if hub.is_name(path):
        return CheckpointFolder(Format.HUGGING_FACE, hub.model_folder(path, weights=weights))
    path = path.rstrip("/") or "/"
    names = files.list_dir(path)
    if _is_native_step(path, names):
        return CheckpointFolder(Format.NATIVE, path)
    if native := [name for name in _step_names(names) if _is_native_step(files.join(path, name))]:
        return CheckpointFolder(Format.NATIVE, files.join(path, native[-1]))
    if classic := classic_folder.find_step(path):
        return CheckpointFolder(Format.CLASSIC, classic)
    stored = [name for name in names if _WEIGHTS.fullmatch(name)]
    if stored and "config.json" not in names:
        raise UserError(f"{path} holds {listed(stored)} but no config.json: put config.json into the folder")
    if stored:
        return CheckpointFolder(Format.HUGGING_FACE, path)
    root, _, name = path.rpartition("/")
    if not names and re.fullmatch(r"step_\d+", name) and (steps := finished_steps(root or ".")):
        raise UserError(f"no {name} in {root or '.'}: it has {listed(steps)}")
    hint = "" if names or files.is_remote(path) else f"; a model on the Hugging Face hub is named {hub.FORM}"
    raise UserError(
        f"no checkpoint in {path}{files.seen_from(path)}: expected the folder of a run or one of its step_N folders, a "
        "classic step_N folder with shard_0 in it, or a Hugging Face folder with config.json and weights; found "
        f"{listed(names, most=8)}{hint}"
    )


def classic_run(root: str) -> ClassicRun | None:
    """The run of the original program in `root`; None if `root` holds no classic step.

    Raises:
        UserError: `root` holds classic steps, but no meta.json that names one of them.
    """
    if not any(classic_folder.is_step(files.join(root, name)) for name in _step_names(files.list_dir(root))):
        return None
    meta = classic_folder.read_meta(root)
    if meta is None:
        raise UserError(
            f"{root} holds steps of the original program but not its meta.json, so the run cannot be resumed: restore "
            f"meta.json, or start from one step with --tune-model-path and another checkpoint.model_dir"
        )
    folder = classic_folder.find_step(root)
    aux = meta.aux.get(str(meta.step))
    return ClassicRun(folder or root, aux if isinstance(aux, dict) else {})


def finished_steps(root: str) -> list[str]:
    """The names of the finished native and classic steps directly under `root`, ascending."""
    folders = ((name, files.join(root, name)) for name in _step_names(files.list_dir(root)))
    return [name for name, folder in folders if _is_native_step(folder) or classic_folder.is_step(folder)]


def check_only_step(root: str, step: int) -> None:
    """Refuse a root with finished steps, native or classic, other than `step`.

    Readers of the root use its newest step, and a run deletes older steps.

    Raises:
        UserError: there are other steps; the message names them.
    """
    others = [name for name in finished_steps(root) if name != f"step_{step}"]
    if others:
        raise UserError(
            f"{root} holds {listed(others)}: step_{step} of another checkpoint cannot be written to the same folder; "
            "choose another folder"
        )


def open_source(path: str, model: ModelConfig) -> TensorSource:
    """Open the checkpoint at `path` in any format; see `find_checkpoint`. Reads no tensor.

    Raises:
        UserError: there is no checkpoint, or it is damaged or of another model.
    """
    return open_folder(find_checkpoint(path), model)


def open_step(root: str, model: ModelConfig, step: int | None) -> TensorSource:
    """Open one step, native or classic, of the run in a folder; None: `open_source`.

    Raises:
        UserError: the folder has no such step, or as in `open_source`.
    """
    if step is None:
        return open_source(root, model)
    names, name = files.list_dir(root), f"step_{step}"
    if name not in names:
        steps = classic_folder.step_numbers(names)
        raise UserError(f"no checkpoint of step {step} in {root}: available are {steps}")
    return open_source(files.join(root, name), model)


def open_folder(folder: CheckpointFolder, model: ModelConfig) -> TensorSource:
    """Open a checkpoint that `find_checkpoint` returned; errors as in `open_source`."""
    if folder.format is Format.HUGGING_FACE:
        return HFSource(folder.path, model)
    native = folder.format is Format.NATIVE
    source: TensorSource = NativeSource(folder.path) if native else ClassicSource(folder.path, model)
    check_model(source, model)
    return source


def hf_files(folder: CheckpointFolder) -> str | None:
    """The folder with config.json and the tokenizer of the Hugging Face folder that a checkpoint came from, if any."""
    match folder.format:
        case Format.HUGGING_FACE:
            return folder.path
        case Format.NATIVE if origin.FOLDER in files.list_dir(folder.path):
            return files.join(folder.path, origin.FOLDER)
    return None


def origin_of(folder: CheckpointFolder, source: TensorSource) -> Origin | None:
    """The Hugging Face folder that an open checkpoint came from, or is; None for others.

    Raises:
        UserError: a file is too large.
    """
    if folder.format is Format.NATIVE:
        return origin.read_origin(folder.path, source.extra)
    contents = origin.read_files(folder.path) if folder.format is Format.HUGGING_FACE else None
    return None if contents is None else Origin(contents, uniform_dtype(source))


def recorded_config(folder: CheckpointFolder) -> dict[str, Any] | None:
    """The config that a checkpoint records, with grouped keys: the model, and the tokenizer if it names one.

    Returns None if the checkpoint does not record its model.

    Raises:
        UserError: the recorded config cannot be read.
    """
    config: Any
    match folder.format:
        case Format.HUGGING_FACE:
            config = {"model": read_model(folder.path).model_dump(mode="json")}
        case Format.NATIVE:
            config = read_manifest(folder.path).extra.get("config")
        case Format.CLASSIC:
            config = classic_folder.read_config(folder.path)
    model = recorded_model(config, folder.path)
    if model is None:
        return None
    data = config.get("data")
    tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
    return {
        "model": model.model_dump(mode="json"),
        "data": {"tokenizer": tokenizer if isinstance(tokenizer, str) else None},
    }


def _is_native_step(folder: str, names: list[str] | None = None) -> bool:
    """Whether a folder is a finished native step; `names` are the names in it, if the caller has listed them."""
    inside = set(files.list_dir(folder) if names is None else names)
    return {"state", "manifest"} <= inside and (not files.is_remote(folder) or COMMIT_MARKER in inside)


def _step_names(names: list[str]) -> list[str]:
    """The names of the form step_N, ascending by N."""
    steps = [name for name in names if re.fullmatch(r"step_\d+", name)]
    return sorted(steps, key=lambda name: int(name.removeprefix("step_")))
