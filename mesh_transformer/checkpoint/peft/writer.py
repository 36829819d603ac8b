"""Writes adapters as a folder that PEFT loads. Shapes: see table.py; E experts."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mesh_transformer import files, hub
from mesh_transformer.checkpoint.hf.safetensors_file import encode_header
from mesh_transformer.checkpoint.hf.writer import cast
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.peft.pairs import ADAPTER_TENSORS, PREFIX
from mesh_transformer.checkpoint.peft.table import DOWN, ROUTER, Group, groups_of, joined_b
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, listed
from mesh_transformer.families.experts import WithExperts
from mesh_transformer.logs import log
from mesh_transformer.spec import Adapter
from mesh_transformer.spec.forms import name_of
from mesh_transformer.spec.lora import LORA_A, LORA_B

# what PEFT 0.21 takes for the experts' in a model with experts, wherever it stands; but not in these families
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
_AS_NAMED = ("qwen2_moe",)


class _Written(NamedTuple):
    """A group with adapters, and the adapter of its first matrix, whose rank and scale all of them have."""

    group: Group
    adapter: Adapter


def write_peft(
    source: TensorSource, record: LoraRecord, model: ModelConfig, folder: str, *, dtype: np.dtype, dropout: float = 0.0
) -> None:
    """Write adapters to a new `folder`, local or `gs://`.

    Args:
        source: of the adapters alone.
        record: what they are.
        dtype: of all tensors, whose values it must hold.
        dropout: of their training, which PEFT continues; 0 is written if routed experts have adapters.

    Raises:
        UserError: transformers does not support this model, or has no place for an adapter.
        DamagedCheckpoint: `source` cannot be read.
    """
    # raises UserError if transformers does not support the model
    model.to_hf()
    written = _groups(record, model, source.where)
    tensors = dict(_tensors(source, written, model))
    files.make_folder(folder)
    with files.open_binary(files.join(folder, ADAPTER_TENSORS), "wb") as file:
        file.write(encode_header((name, value.shape, dtype) for name, value in tensors.items()))
        for name, value in tensors.items():
            rounded = np.ascontiguousarray(cast(value, dtype, f"{source.where}: {name}"))
            file.write(rounded.view(f"u{dtype.itemsize}").data.cast("B"))
    text = json.dumps(_config(written, record, model, dropout), indent=2, sort_keys=True) + "\n"
    with files.open_binary(files.join(folder, hub.ADAPTER_CONFIG), "wb") as file:
        file.write(text.encode())


def _groups(record: LoraRecord, model: ModelConfig, where: str) -> list[_Written]:
    """The groups that have adapters.

    Raises:
        UserError: some matrices of a group have none, or another a, rank or scale.
    """
    by_path = {adapter.path: adapter for adapter in record.adapters}
    written = []
    for group in groups_of(model):
        adapters = [by_path.pop(member.path, None) for member in group.members]
        if not any(adapters):
            continue
        # the owner of a, the rank and the scale
        common = {(a.a_of or a.path, a.rank, a.scale) if a else None for a in adapters}
        first = adapters[0]
        if first is None or common != {(group.owner, first.rank, first.scale)}:
            raise UserError(
                f"{where}: {listed([member.path for member in group.members])} are one matrix in transformers, and "
                "have no adapter in common: write the whole model with --merge"
            )
        written.append(_Written(group, first))
    if by_path:
        raise UserError(f"{where} adapts {listed(sorted(by_path))}, which transformers does not have")
    return written


def _tensors(source: TensorSource, written: list[_Written], model: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    stacks = model.decoder().stacks
    for group, adapter in written:
        for number, (stack, layers) in enumerate(stacks[group.owner]):
            a = _read(source, name_of(stack, LORA_A))
            bs = [_read(source, name_of(stacks[member.path][number][0], LORA_B)) for member in group.members]
            for at, layer in enumerate(layers):
                pair = _of_experts if group.of_experts else _of_matrix
                module = _module(group, layer, model, nested=_has_down(written))
                a_RD, b_FR = pair(group, a[at], [b[at] for b in bs], adapter.rank)
                yield f"{PREFIX}{module}.lora_A.weight", a_RD
                yield f"{PREFIX}{module}.lora_B.weight", b_FR


def _of_matrix(group: Group, a_DR: np.ndarray, bs: list[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    return a_DR.T, joined_b(group, bs)


def _of_experts(group: Group, a_EDR: np.ndarray, bs: list[np.ndarray], rank: int) -> tuple[np.ndarray, np.ndarray]:
    """(experts * rank, inputs) and (outputs, rank * experts), as PEFT's `target_parameters`."""
    b_FRE = np.concatenate([b_ERF.transpose(2, 1, 0) for b_ERF in bs])
    return a_EDR.transpose(0, 2, 1).reshape(-1, a_EDR.shape[1]), b_FRE.reshape(len(b_FRE), -1)


def _module(group: Group, layer: int, model: ModelConfig, *, nested: bool) -> str:
    """The name of a module in transformers 5, whose experts are always below `mlp`.

    Args:
        nested: PEFT wraps the input matrices of experts inside of the output matrices.
    """
    module = group.module(layer)
    if isinstance(model, WithExperts):
        module = module.replace(f".{model.HF_MODULE}.", ".mlp.", 1)
    if not group.of_experts:
        return module
    container, _, _ = module.partition(".experts.")
    inner = ".base_layer" if nested and group.parameter != DOWN else ""
    return f"{container}.experts{inner}"


def _has_down(written: list[_Written]) -> bool:
    return any(group.of_experts and group.parameter == DOWN for group, _ in written)


def _read(source: TensorSource, stack: str) -> np.ndarray:
    name = f"params/blocks/{stack}"
    shape = source.tensors[name].shape
    return source.read(name, (slice(None),) * len(shape)).astype(np.float32)


def _config(written: list[_Written], record: LoraRecord, model: ModelConfig, dropout: float) -> dict[str, Any]:
    experts = any(group.of_experts for group, _ in written)
    ((rank, scale), _), *_ = Counter((adapter.rank, adapter.scale) for _, adapter in written).most_common()
    names = {_target(group, model): adapter for group, adapter in written}
    parameters = [_target(group, model) for group, _ in written if _is_parameter(group)]
    modules = [name for name in names if name not in parameters]
    takes_others = isinstance(model, WithExperts) and model.HF_MODEL_TYPE not in _AS_NAMED
    if takes_others and (lost := [name for name in modules if name.endswith(_OF_EXPERTS)]):
        modules = [name for name in modules if name not in lost]
        log.warning(
            "PEFT 0.21 leaves out the adapters of %s: in a model with experts it takes these names for the experts'",
            listed(lost),
        )
        if not modules and not parameters:
            raise UserError("PEFT 0.21 would read none of these adapters: write the whole model with --merge")
    base, revision = _base(record)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _short(scale * rank),
        "lora_dropout": 0.0 if experts else dropout,
        "bias": "none",
        "fan_in_fan_out": any(group.inputs_first for group, _ in written),
        "init_lora_weights": True,
        "use_rslora": False,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "rank_pattern": {name: adapter.rank for name, adapter in names.items() if adapter.rank != rank},
        "alpha_pattern": {
            name: _short(adapter.scale * adapter.rank)
            for name, adapter in names.items()
            if adapter.scale * adapter.rank != scale * rank
        },
    }


def _target(group: Group, model: ModelConfig) -> str:
    """The name of a matrix below the layer."""
    module = _module(group, 0, model, nested=False)
    _, _, name = module.partition(".0.")
    parameter = group.parameter if group.of_experts else "weight"
    return f"{name}.{parameter}" if _is_parameter(group) else name


def _is_parameter(group: Group) -> bool:
    """Whether PEFT adapts it as a parameter: transformers 5 has routed experts and routers in modules of their own
    kinds."""
    return group.of_experts or group.members[0].path == ROUTER


def _base(record: LoraRecord) -> tuple[str | None, str | None]:
    """Name and revision, as PEFT has them."""
    # PEFT opens no GGUF file; its name is read here
    if not hub.is_name(record.base) or hub.gguf_file(record.base) is not None:
        return record.base or None, None
    return hub.parse(record.base)


def _short(number: float) -> float:
    return int(number) if number == int(number) else number
