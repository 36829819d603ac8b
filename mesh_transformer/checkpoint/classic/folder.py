"""The layout of the original program's checkpoints: folders, files, the arrays of a shard, and how shards are combined.

    {root}/step_N/shard_K/{0..15}.npz    the arrays of shard K in order, numbered from 0 in each file
    {root}/meta.json                     the steps that exist, and what the run recorded for each

The order of the arrays follows from the module names and the config. The parameters are a mapping
{module: {field: array}}, flattened in the alphabetical order of the module names (layer_10 comes before layer_2), then
of the fields. The arrays of a shard are the leaves of `opt_state` (a full checkpoint only), `params` and `step`.
"""

import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel, NonNegativeInt, ValidationError

from mesh_transformer import files
from mesh_transformer.checkpoint.tensors import unpadded_shape
from mesh_transformer.config import ModelConfig, strict_json
from mesh_transformer.errors import UserError
from mesh_transformer.spec import Split

FILES_PER_SHARD = 16
PREFIX = "causal_transformer_shard/~/"
ADAM_COUNT, SCHEDULE_COUNT, STEP = "opt_state[2].count", "opt_state[5].count", "step"
# in the order of `tensors.Counts`
COUNTS = (STEP, ADAM_COUNT, SCHEDULE_COUNT)
_MOMENTS = {"mu": "opt_state[2].mu/", "nu": "opt_state[2].nu/"}
MAX_META_BYTES = 16 << 20
# a config with the model only, in the steps that this program writes; the original program ignores it
CONFIG = "model.json"


class Meta(BaseModel, strict=True):
    """meta.json: the newest step, the kept steps, and what a run recorded for each."""

    step: NonNegativeInt
    checkpoints: list[NonNegativeInt]
    # by step, as a string: {"train_loader": {"file_idx": ..., "used": ...}}
    aux: dict[str, Any] = {}


def shard_file(folder: str, shard: int, number: int) -> str:
    """The path of a file of a shard."""
    return files.join(folder, f"shard_{shard}", f"{number}.npz")


def step_numbers(names: Iterable[str]) -> list[int]:
    """The numbers N of the names step_N, ascending."""
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d+)", name)))


def is_step(folder: str) -> bool:
    """Whether a folder is a step of the original program."""
    return has_shards(files.list_dir(folder))


def has_shards(names: Iterable[str]) -> bool:
    """Whether a folder with these names is a step of the original program."""
    return any(re.fullmatch(r"shard_\d+", name) for name in names)


def read_meta(root: str) -> Meta | None:
    """meta.json of a root; None if the file does not exist.

    Raises:
        UserError: the file is not a meta.json of the original program.
    """
    path = files.join(root, "meta.json")
    if not files.exists(path):
        return None
    # a larger file is truncated, and the result is not JSON
    content = files.read_range(path, 0, MAX_META_BYTES)
    if b'"total_hosts"' in content:
        raise UserError(explain_v2(root))
    try:
        return Meta.model_validate_json(content)
    except ValidationError as error:
        wrong = error.errors()[0]
        raise UserError(
            f"{path}: expected a JSON object with step, checkpoints and aux, as the original program writes it: "
            f"{'.'.join(map(str, wrong['loc']))} {wrong['msg']}"
        ) from error


def write_meta(folder: str, step: int, aux: Any = None) -> None:
    """Add a finished step to the meta.json in its parent folder, if the folder has the name step_N."""
    root, name = posixpath.split(folder.rstrip("/"))
    if name != f"step_{step}":
        return
    meta = read_meta(root) or Meta(step=step, checkpoints=[])
    meta.step = max(step, meta.step)
    meta.checkpoints = sorted({*meta.checkpoints, step})
    meta.aux[str(step)] = {} if aux is None else aux
    files.replace(files.join(root, "meta.json"), json.dumps(meta.model_dump()).encode())


def read_config(folder: str) -> dict[str, Any] | None:
    """The config in a step folder that this program wrote; None in one of the original program.

    Raises:
        UserError: the file is too large, or is not a JSON object.
    """
    path = files.join(folder, CONFIG)
    return strict_json.read_object(path) if files.exists(path) else None


def write_config(folder: str, config: dict[str, Any]) -> None:
    """Write a config, {"model": ...}, to a step folder."""
    files.replace(files.join(folder, CONFIG), json.dumps(config, indent=2).encode() + b"\n")


def explain_v2(path: str) -> str:
    """The message for a checkpoint of the V2 model: {root}/params/shard_H.npz, one file per host."""
    return (
        f"{path} is a checkpoint of the original program's unreleased V2 model (params/shard_N.npz, one file per "
        f"host), which is not supported: choose a checkpoint with step_N/shard_K/0.npz to 15.npz"
    )


class Leaf(NamedTuple):
    """One array of each shard."""

    # in the original program
    name: str
    # in a `TensorSource`: params/..., mu/... or nu/...; None: this program has no such tensor
    tensor: str | None
    # index in the stacked tensor; None: `tensor` is not stacked
    layer: int | None
    # the dimension that is padded in `tensor`
    vocab_axis: int | None
    # of the whole array, without padding
    shape: tuple[int, ...]
    split: Split

    def shard_shape(self, shards: int) -> tuple[int, ...]:
        """The shape in each of `shards` shards."""
        shape = list(self.shape)
        if self.split in (Split.ROWS, Split.COLUMNS):
            shape[self.axis] //= shards
        return tuple(shape)

    @property
    def axis(self) -> int:
        """The dimension along which the parts are concatenated."""
        return 0 if self.split is Split.ROWS else len(self.shape) - 1

    @property
    def unused(self) -> float:
        """The value that the original program leaves in an unused array: its initial value."""
        return 1.0 if self.name.startswith("params/") and self.name.endswith("/scale") else 0.0


def check_shards(config: ModelConfig, shards: int, where: str) -> None:
    """Refuse a number of shards that the model cannot be split into.

    Raises:
        UserError: the heads or the vocabulary cannot be split evenly; the message lists the possible numbers.
    """
    common = math.gcd(config.n_heads, config.n_vocab)
    if shards < 1 or common % shards:
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise UserError(
            f"{where}: {shards} shards do not divide model.n_heads {config.n_heads} and model.n_vocab "
            f"{config.n_vocab}: possible are {allowed}"
        )


def leaves(config: ModelConfig, *, full: bool) -> list[Leaf]:
    """The arrays of a shard in the order of the files."""
    params = list(_parameters(config))
    if not full:
        return [*params, _count(STEP)]
    mu, nu = (
        [
            leaf._replace(
                name=leaf.name.replace("params/", start, 1),
                tensor=leaf.tensor and leaf.tensor.replace("params/", f"{kind}/", 1),
                # the gradient of a summed bias is the same in all shards
                split=Split.MEAN if leaf.split is Split.SUM else leaf.split,
            )
            for leaf in params
        ]
        for kind, start in _MOMENTS.items()
    )
    return [_count(ADAM_COUNT), *mu, *nu, _count(SCHEDULE_COUNT), *params, _count(STEP)]


def group_by_file(leaves: list[Leaf]) -> list[list[Leaf]]:
    """The arrays of each of the 16 files: consecutive groups of equal length; the first groups take the remainder."""
    length, remainder = divmod(len(leaves), FILES_PER_SHARD)
    starts = [i * length + min(i, remainder) for i in range(FILES_PER_SHARD + 1)]
    return [leaves[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]


def explain_count(config: ModelConfig, found: int) -> str:
    """The part of a message that explains `found`, an unexpected number of arrays per shard."""
    slim, full = len(leaves(config, full=False)), len(leaves(config, full=True))
    text = f"expected {slim} arrays (slim) or {full} (full) for model.layers {config.layers}, found {found}"
    block = sum(row.stacked for row in config.classic_tensors())
    for name, copies, count in (("slim", 1, slim), ("full", 3, full)):
        layers, rest = divmod(found - (count - copies * block * config.layers), copies * block)
        if not rest and layers > 0:
            text += f"; a {name} checkpoint of {layers} layers has this number"
    return text


def _count(name: str) -> Leaf:
    return Leaf(name, None, None, None, (), Split.COUNT)


def _parameters(config: ModelConfig) -> Iterator[Leaf]:
    named = {
        row.foreign.format(layer): (row, layer)
        for row in config.classic_tensors()
        for layer in (range(config.layers) if row.stacked else [None])
    }
    for name in sorted(named, key=lambda name: name.rsplit("/", 1)):
        row, layer = named[name]
        tensor = None if row.split is Split.UNUSED else f"params/{row.parameter}"
        yield Leaf(f"params/{PREFIX}{name}", tensor, layer, row.vocab_axis, unpadded_shape(row, config), row.split)
