"""Which form of checkpoint a path holds, told by what lies there."""

from __future__ import annotations

import enum
import json
import re
from typing import Any, NamedTuple

from mesh_transformer import files
from mesh_transformer.errors import UserError

COMMIT_MARKER = "commit_success.txt"
MAX_META_BYTES = 16 << 20
MAX_STEP = 2**31 - 1  # steps are int32
SHOWN = 8  # names listed in an error message


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
    """The folder of a run of the original program, by its meta.json: the newest step and what is kept beside it."""

    step: int
    folder: str  # that step's
    aux: dict[str, Any]


def recognise(path: str) -> Found:
    """The checkpoint at `path`: a step folder, a run's folder (its newest step) or a Hugging Face folder.

    In a folder with native and classic steps the native ones count: a classic run was gone on with.

    Raises:
        UserError: there is none, or one of a layout that is not read; the message lists what is there.
    """
    path = path.rstrip("/") or "/"
    names = files.list_dir(path)
    if found := _direct(path, names):
        return found
    steps = {name: files.list_dir(files.join(path, name)) for name in _step_names(names)}
    native = [name for name, inside in steps.items() if _is_native(inside, files.is_remote(path))]
    if native:
        return Found(Form.NATIVE, files.join(path, native[-1]))
    if any(_is_classic(inside) for inside in steps.values()):
        return Found(Form.CLASSIC, _newest_classic(path, [n for n, i in steps.items() if _is_classic(i)]))
    for inside in [names, *steps.values()]:
        _refuse_v2(path, inside)
    raise UserError(
        f"no checkpoint in {path}: expected a run's folder or one of its step_N folders, a classic step_N folder "
        f"with shard_0 in it, or a Hugging Face folder with config.json and weights; found {_some(names)}"
    )


def classic_run(root: str) -> ClassicRun | None:
    """The run of the original program that `root` holds, or None if there is no classic step in it.

    Raises:
        UserError: there are classic steps, and no meta.json that names one of them.
    """
    names = files.list_dir(root)
    if not any(is_classic_step(files.join(root, name)) for name in _step_names(names)):
        return None
    if "meta.json" not in names:
        raise UserError(
            f"{root} holds steps of the original program but not its meta.json, so that its run cannot be gone on with: "
            f"put meta.json back, or start from one step with --tune-model-path and another checkpoint.model_dir"
        )
    meta = read_meta(root)
    folder = files.join(root, f"step_{meta['step']}")
    if not is_classic_step(folder):
        raise UserError(
            f"{files.join(root, 'meta.json')} names step {meta['step']}, and {folder} is not there"
        )
    aux = meta.get("aux")
    aux = aux.get(str(meta["step"])) if isinstance(aux, dict) else None
    return ClassicRun(meta["step"], folder, aux if isinstance(aux, dict) else {})


def read_meta(root: str) -> dict[str, Any]:
    """The meta.json of a classic run; its `step` is a whole number.

    Raises:
        UserError: it is missing or something else.
    """
    path = files.join(root, "meta.json")
    with files.open_binary(path) as file:
        content = file.read(MAX_META_BYTES + 1)
    try:
        meta = json.loads(content) if len(content) <= MAX_META_BYTES else None
    except (ValueError, RecursionError):
        meta = None
    step = meta.get("step") if isinstance(meta, dict) else None
    if not isinstance(meta, dict) or type(step) is not int or not 0 <= step <= MAX_STEP:
        raise UserError(f'{path} is not the original\'s: expected {{"step": N, "checkpoints": [...], ...}}')
    return meta


def is_classic_step(folder: str) -> bool:
    """Whether a step folder is of the original program."""
    return _is_classic(files.list_dir(folder))


def _direct(path: str, names: list[str]) -> Found | None:
    if _is_classic(names):
        return Found(Form.CLASSIC, path)
    if _is_native(names, files.is_remote(path)):
        return Found(Form.NATIVE, path)
    weights = [name for name in names if re.search(r"\.(safetensors|bin)(\.index\.json)?$", name)]
    if weights and "config.json" in names:
        return Found(Form.HUGGING_FACE, path)
    if weights and re.search(r"^(model|pytorch_model)", weights[0]):
        raise UserError(f"{path} holds {_some(weights)} but no config.json: put it back beside the weights")
    return None


def _newest_classic(root: str, steps: list[str]) -> str:
    """The step that meta.json names, which the original writes last; without meta.json the greatest."""
    if files.exists(files.join(root, "meta.json")):
        named = f"step_{read_meta(root)['step']}"
        if named not in steps:
            raise UserError(f"{files.join(root, 'meta.json')} names {named}, and there are {_some(steps)}")
        return files.join(root, named)
    return files.join(root, steps[-1])


def _step_names(names: list[str]) -> list[str]:
    """The step_N among names, ascending by N."""
    steps = [name for name in names if re.fullmatch(r"step_\d+", name)]
    return sorted(steps, key=lambda name: int(name.removeprefix("step_")))


def _is_classic(names: list[str]) -> bool:
    return "shard_0" in names


def _is_native(names: list[str], remote: bool) -> bool:
    return {"state", "manifest"} <= set(names) and (not remote or COMMIT_MARKER in names)


def _refuse_v2(path: str, names: list[str]) -> None:
    if {"params", "opt_state", "meta.json"} <= set(names):
        raise UserError(
            f"{path} is of the original's TransformerV2 (params/shard_N.npz, one a host), a model that was never "
            f"released and whose layout is not read: use a checkpoint with step_N/shard_K/0..15.npz"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (", ".join(names[:SHOWN]) + more) or "nothing"
