"""The tensors of a GGUF file, under the names of the family's own file."""

import dataclasses
import math
import re

from mesh_transformer.checkpoint.gguf.model import row_of
from mesh_transformer.checkpoint.gguf.rotary import FACTORS, FREQUENCIES
from mesh_transformer.checkpoint.gguf.rules import joined_kv_b, reverted
from mesh_transformer.checkpoint.gguf.tensor import GgufTensor
from mesh_transformer.checkpoint.hf.source import HFSource, foreign_names, foreign_shape, stacked_rows
from mesh_transformer.checkpoint.identity import check_same_architecture
from mesh_transformer.checkpoint.tensors import RowTensor
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError, listed
from mesh_transformer.gguf.header import Header
from mesh_transformer.logs import log

# numbers of the rotary encoding, which the config has
_ROTARY = {"llama3": {FREQUENCIES}, "longrope": set(FACTORS.values())}


def open_tensors(header: Header, model: ModelConfig) -> dict[str, RowTensor]:
    """Every tensor of a model by the name in the family's own file. Reads none but the factors of frequencies.

    Raises:
        UserError: the file has a tensor that the model does not have, or one of a type without weights.
    """
    names = _Names(model)
    tensors: dict[str, RowTensor] = {}
    used: set[str] = set()
    for row in stacked_rows(model):
        shape = foreign_shape(row, model)
        for place, name in foreign_names(row, model):
            if row_of(model).split_kv_b and name.endswith("kv_b_proj.weight"):
                parts = [names.of(name.replace("kv_b_proj", part)) for part in ("k_b_proj", "v_b_proj")]
                if set(parts) <= header.tensors.keys():
                    used |= set(parts)
                    tensors[name] = joined_kv_b(*(GgufTensor.of(header.tensors[part]) for part in parts))
                    continue
            stored = names.of(re.sub(r"\.experts\.\d+\.", ".experts.", name))
            if stored not in header.tensors:
                continue
            used.add(stored)
            tensor = GgufTensor.of(header.tensors[stored])
            if "{e}" in row.foreign:
                tensor = _expert(tensor, place[-1])
            elif shape[:1] == (1,) and tensor.shape == shape[1:]:
                # ggml drops dimensions of 1 in front
                tensor = dataclasses.replace(tensor, shape=shape)
            tensors[name] = reverted(row_of(model).rules, name, tensor, model)
    used |= _ROTARY.get(getattr(model, "rotary_scaling", "none"), set())
    for name in sorted(header.tensors.keys() - used):
        if re.fullmatch(r"blk\.\d+\.ffn_\w+\.\d+\.weight", name):
            raise UserError(f"{header.path}: {name} is of one expert, as before 2024: convert the model again")
        if not _predicts_later(name, header, model):
            raise UserError(f"{header.path}: {name} is not a tensor of {model.family} with {model.layers} layers")
    return tensors


def _predicts_later(name: str, header: Header, model: ModelConfig) -> bool:
    """Whether a tensor is of a layer that predicts later tokens: they stand behind the others, and are not read."""
    layer = re.match(r"blk\.(\d+)\.", name)
    others = header.get(f"{row_of(model).architecture}.nextn_predict_layers", int, 0)
    return layer is not None and model.layers <= int(layer[1]) < model.layers + others


class GgufSource(HFSource):
    """The weights of a GGUF file as a `TensorSource`."""

    def __init__(self, header: Header, recorded: ModelConfig, model: ModelConfig):
        """Check every name and shape. Reads no tensor.

        Args:
            header: with the tensors of all parts of the file.
            recorded: the model of the file.
            model: the architecture that the file must have.

        Raises:
            UserError: they differ, or the file is incomplete.
        """
        check_same_architecture(model, recorded, where=header.path)
        tensors = open_tensors(header, recorded)
        kinds = {tensor.kind_name for tensor in header.tensors.values()} - {"F16", "BF16", "F32"}
        if kinds:
            size = sum(math.prod(tensor.shape) for tensor in tensors.values()) * 4
            log.info("%s: %s is dequantised to float32: %.2f GB", header.path, listed(sorted(kinds)), size / 1e9)
        self._set_up(header.path, model, recorded, tensors, tied=True)


def _expert(tensor: GgufTensor, expert: int) -> GgufTensor:
    if len(tensor.shape) != 3 or expert >= tensor.shape[0]:
        raise UserError(f"{tensor.path}: {tensor.name} has shape {tensor.shape}: expert {expert} is missing")
    return tensor.part(expert)


class _Names:
    """The names in GGUF files, which the package `gguf` derives from those of transformers."""

    def __init__(self, model: ModelConfig):
        from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

        row = row_of(model)
        numbers: dict[str, MODEL_ARCH] = {name: number for number, name in MODEL_ARCH_NAMES.items()}
        self._map = get_tensor_name_map(numbers[row.architecture], model.layers)
        self._changes = row.names

    def of(self, name: str) -> str:
        """The name of a tensor; empty: the package knows none."""
        for pattern, replacement in self._changes.items():
            name = re.sub(pattern, replacement, name)
        return self._map.get_name(name, try_suffixes=(".weight", ".bias")) or ""
