"""The group `lora`, and the adapters that it asks of a model."""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, model_validator

from mesh_transformer.errors import UserError, listed, set_options
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.fields import ConfigGroup, Count, Derived, Fraction, Name, Positive, Words
from mesh_transformer.spec import Adapter, Arrays, Decoder, Lora

ALL_LINEAR = "all-linear"
# the matrices of one routed expert that transformers holds as one
_OF_EXPERT = ("ff/experts/gate", "ff/experts/in")


def _names(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


class LoraConfig(ConfigGroup):
    """Low-rank adapters (LoRA, arXiv:2106.09685): x w becomes x w + alpha / rank x (dropout(x) a) b. Only a and b are
    trained. The run starts from the checkpoint of --tune-model-path, whose parameters are frozen (docs/lora.md)."""

    rank: Count | None = None
    """rank of a and b; absent: no adapters, all parameters are trained"""
    alpha: Annotated[Positive | None, Derived("rank")] = None
    """alpha / rank multiplies the adapters"""
    dropout: Fraction = 0.0
    """share of the input of each adapter that is set to 0 in training"""
    targets: Annotated[
        tuple[Name, ...],
        BeforeValidator(_names),
        Words(f'"{ALL_LINEAR}", or names of matrices such as ["q", "attention/v", "down_proj"]'),
    ] = (ALL_LINEAR,)
    """matrices that have adapters: all-linear (every matrix of attention and feed-forward, of experts too; never
    routers, tables and the head), or ends of their paths, or their names in transformers"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank is None and (
            given := [name for name, value in self if value != type(self).model_fields[name].default]
        ):
            raise UserError(
                f"lora.{given[0]} has no effect without lora.rank: set the rank ({set_options('lora.rank=16')}), or "
                "remove it"
            )
        if not self.targets or (ALL_LINEAR in self.targets and len(self.targets) > 1):
            raise UserError(f'lora.targets: give "{ALL_LINEAR}" alone, or at least one name of a matrix')
        return self


def with_adapters(decoder: Decoder, lora: LoraConfig, model: ModelConfig) -> Decoder:
    """The decoder of `model` with the adapters of `lora`.

    Raises:
        UserError: a target is unknown, or some of the matrices are targets that share an adapter with others, or the
            rank is over a side of a matrix.
    """
    if lora.rank is None:
        return decoder
    matrices = _matrices(decoder)
    foreign = foreign_names(model)
    chosen = list(matrices) if lora.targets == (ALL_LINEAR,) else _chosen(lora.targets, list(matrices), foreign)
    groups = _sharing(matrices, foreign)
    for group, name in groups.items():
        targets = [path for path in group if path in chosen]
        if targets and len(targets) < len(group):
            every = json.dumps([path for path in matrices if path in chosen or path in group])
            raise UserError(
                f"lora.targets has {listed(targets)}, and transformers has {listed(list(group))} in one matrix "
                f"({name}), which has one adapter: name all of them ({set_options(f'lora.targets={every}')}), or none"
            )
    _check_rank(lora.rank, {path: matrices[path] for path in chosen})
    if lora.dropout and (experts := [path for path in chosen if matrices[path].dims.startswith("e")]):
        raise UserError(
            f"lora.dropout {lora.dropout} is not computed for routed experts ({listed(experts)}): set lora.dropout=0, "
            "or name targets without them"
        )
    scale = (lora.alpha or lora.rank) / lora.rank
    a_of = {path: group[0] for group in groups for path in group}
    adapters = (
        Adapter(path=_stored(path), rank=lora.rank, scale=scale, a_of=_stored(a_of.get(path, path))) for path in chosen
    )
    return replace(decoder, forms=(Lora(adapters=tuple(adapters), dropout=lora.dropout),))


def _matrices(decoder: Decoder) -> Arrays:
    """The matrices that may have adapters, by path without the name of the array, such as `attention/q`."""
    matrices = decoder.matrices_by_path
    return {path.removesuffix("/w"): array for path, array in matrices.items() if array.role != "other"}


def _stored(path: str) -> str:
    """The path of the array of a matrix: the experts' matrices are arrays of one module."""
    return path if "/experts/" in path else f"{path}/w"


@functools.lru_cache(maxsize=8)
def foreign_names(model: ModelConfig) -> Mapping[str, str]:
    """By matrix: the name of the foreign tensor that holds it, below the layer, such as `self_attn.q_proj`."""
    if model.HF_MODEL_TYPE is None:
        return {}
    names = {}
    for row in model.hf_tensors():
        path = row.parameter.removeprefix("blocks/").removesuffix("/w")
        if row.stacked and (row.parameter.endswith("/w") or "/experts/" in path):
            _, _, name = row.foreign.removesuffix(".weight").partition("{}.")
            names[path] = name.replace("{e}.", "")
    return names


def _chosen(targets: Sequence[str], paths: Sequence[str], foreign: Mapping[str, str]) -> list[str]:
    """The matrices that targets name, in the order of the model."""
    chosen: set[str] = set()
    for target in targets:
        named = {
            path
            for path in paths
            if f"/{path}".endswith(f"/{target}") or f".{foreign.get(path, '')}".endswith(f".{target}")
        }
        if not named:
            known = dict.fromkeys([*paths, *(re.sub(r".*\.", "", foreign[path]) for path in paths if path in foreign)])
            raise UserError(
                f"lora.targets: no matrix of the layers is called {target!r:.60}: name some of {', '.join(known)}"
            )
        chosen |= named
    return [path for path in paths if path in chosen]


def _sharing(matrices: Arrays, foreign: Mapping[str, str]) -> dict[tuple[str, ...], str]:
    """The matrices that are one matrix in transformers, and so share an a; by group, its name there."""
    by_name: dict[str, list[str]] = {}
    for path in matrices:
        if path in foreign:
            by_name.setdefault(foreign[path], []).append(path)
    groups = {tuple(paths): name for name, paths in by_name.items() if len(paths) > 1}
    if all(path in matrices for path in _OF_EXPERT):
        groups[_OF_EXPERT] = "experts.gate_up_proj"
    return groups


def _check_rank(rank: int, matrices: Arrays) -> None:
    sides = {path: _sides(array.shape, array.dims) for path, array in matrices.items()}
    path = min(sides, key=lambda path: min(sides[path]))
    if rank > min(sides[path]):
        inputs, outputs = sides[path]
        raise UserError(
            f"lora.rank {rank} is over a side of {path}, which is {inputs} x {outputs}: at most {min(sides[path])} is "
            "possible for these targets"
        )


def _sides(shape: Sequence[int], dims: str) -> tuple[int, int]:
    """Inputs and outputs of a matrix."""
    sizes = {"i": 1, "o": 1, "e": 1}
    for size, dim in zip(shape, dims, strict=True):
        sizes[dim] *= size
    return sizes["i"], sizes["o"]
