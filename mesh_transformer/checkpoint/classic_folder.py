"""The folders of the original program: `{root}/step_N/shard_K/{0..15}.npz`, and `{root}/meta.json` beside the steps."""

import json
import posixpath
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import files
from mesh_transformer.checkpoint.classic_layout import PIECES
from mesh_transformer.checkpoint.npz import NpzReader
from mesh_transformer.config import strict_json
from mesh_transformer.errors import UserError

MAX_META_BYTES = 16 << 20
CONFIG = "model.json"  # of our own steps: a config with the model alone, which the original does not look for


class Meta(NamedTuple):
    """meta.json: the newest step, the steps that are kept, and what a run noted beside each."""

    step: int
    checkpoints: list[int]
    aux: dict[str, Any]  # by step, as a string: {"train_loader": {"file_idx": ..., "used": ...}}


class Form(NamedTuple):
    """What a step folder holds."""

    shards: int
    full: bool  # with Adam's moments


def piece(folder: str, shard: int, number: int) -> str:
    """The path of one file of a shard."""
    return files.join(folder, f"shard_{shard}", f"{number}.npz")


def step_numbers(names: Iterable[str]) -> list[int]:
    """N of each step_N among names, ascending."""
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d+)", name)))


def is_step(folder: str) -> bool:
    """Whether a step folder is of the original program."""
    return any(re.fullmatch(r"shard_\d+", name) for name in files.list_dir(folder))


def find_step(path: str, step: int | None = None) -> str | None:
    """The step folder that `path` is, or the one of `step` (the newest without it) in the root that it is.

    None: `path` is neither.

    Raises:
        UserError: the root has no such step, or meta.json names one that is not there; or it is a folder of V2.
    """
    path = path.rstrip("/") or path
    names = files.list_dir(path)
    _refuse_v2(path, names)
    if "shard_0" in names:
        return path
    there = [number for number in step_numbers(names) if "shard_0" in files.list_dir(_step(path, number))]
    if not there:
        return None
    meta = read_meta(path)
    if step is None:
        step = meta.step if meta is not None else there[-1]
    if step not in there:
        raise UserError(f"no classic checkpoint of step {step} in {path}: there are {there}")
    return _step(path, step)


def inspect(folder: str) -> Form:
    """The shard count of a step folder, and whether it is full: those begin with a scalar, Adam's count.

    Raises:
        UserError: shards or files are missing.
    """
    names = files.list_dir(folder)
    numbers = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"shard_(\d{1,5})", name)))
    if not numbers:
        raise UserError(f"{folder}: expected shard_0, shard_1, ... in it, found {names[:5] or 'nothing'}")
    missing = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if missing:
        raise UserError(f"{folder}: shard_{missing[0]} is missing: {len(numbers)} shards are there")
    for number in numbers:
        there = set(files.list_dir(files.join(folder, f"shard_{number}")))
        absent = [f"{i}.npz" for i in range(PIECES) if f"{i}.npz" not in there]
        if absent:
            raise UserError(f"{folder}/shard_{number}: {', '.join(absent)} missing (copied in part?)")
    first = NpzReader().open(piece(folder, 0, 0)).get("arr_0")
    full = first is not None and first.shape == () and first.dtype == np.int32
    return Form(len(numbers), full)


def read_meta(root: str) -> Meta | None:
    """meta.json of a root; None if there is none.

    Raises:
        UserError: it is not what the original writes.
    """
    path = files.join(root, "meta.json")
    if not files.exists(path):
        return None
    content = files.read_range(path, 0, MAX_META_BYTES + 1)
    try:
        if len(content) > MAX_META_BYTES:
            raise ValueError("it is too large")
        raw = json.loads(content)
        if "total_hosts" in raw:
            raise UserError(_v2(root))
        meta = Meta(raw["step"], list(raw["checkpoints"]), dict(raw.get("aux", {})))
        if not all(type(step) is int and step >= 0 for step in (meta.step, *meta.checkpoints)):
            raise ValueError("a step is not a whole number")
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path}: expected a JSON object with step, checkpoints and aux as the original writes it: {error!r}"
        ) from error
    return meta


def write_meta(folder: str, step: int, aux: Any = None) -> None:
    """Add a finished step folder to the meta.json beside it, if it has the name of one, step_N."""
    root, name = posixpath.split(folder.rstrip("/"))
    if name != f"step_{step}":
        return
    known = read_meta(root) or Meta(step, [], {})
    meta = Meta(
        max(step, known.step),
        sorted({*known.checkpoints, step}),
        {**known.aux, str(step): {} if aux is None else aux},
    )
    files.replace(files.join(root, "meta.json"), json.dumps(meta._asdict()).encode())


def read_config(folder: str) -> dict[str, Any] | None:
    """The config that a step folder of ours notes; None if it is another's.

    Raises:
        UserError: it is too large, or no JSON object.
    """
    path = files.join(folder, CONFIG)
    return strict_json.read_object(path) if files.exists(path) else None


def write_config(folder: str, config: dict[str, Any]) -> None:
    """Note the model of a step folder: {"model": ...}."""
    files.replace(files.join(folder, CONFIG), json.dumps(config, indent=2).encode() + b"\n")


def _step(root: str, number: int) -> str:
    return files.join(root, f"step_{number}")


def _refuse_v2(path: str, names: list[str]) -> None:
    """The V2 model keeps {root}/params/shard_H.npz, one file a host."""
    if "params" in names and any(
        re.fullmatch(r"shard_\d+\.npz", name) for name in files.list_dir(files.join(path, "params"))
    ):
        raise UserError(_v2(path))


def _v2(path: str) -> str:
    return (
        f"{path} is a checkpoint of the original's unreleased V2 model (params/shard_N.npz, one file a host): "
        f"that is another model; only step_N/shard_K/0.npz to 15.npz can be read"
    )
