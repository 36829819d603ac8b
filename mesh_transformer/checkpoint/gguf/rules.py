"""What llama.cpp's converter did to values, reverted (families/gguf_rows.py has the table `Rule`)."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mesh_transformer.checkpoint.gguf.tensor import ComputedTensor, GgufTensor
from mesh_transformer.checkpoint.tensors import RowTensor
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError
from mesh_transformer.families.gguf_rows import Rule


def _permuted_heads(name: str, tensor: GgufTensor, model: Any) -> RowTensor:
    heads = {"q_proj": model.n_heads, "k_proj": model.n_kv_heads}.get(name.rsplit(".", 2)[-2])
    if heads is None:
        return tensor
    # in the file: (heads, pairs, halves)
    return _ordered(tensor, np.arange(tensor.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))


def _parts_of_qkv(name: str, tensor: GgufTensor, model: Any) -> RowTensor:
    if ".query_key_value." not in name:
        return tensor
    return _ordered(tensor, np.arange(tensor.shape[0]).reshape(3, model.n_heads, -1).swapaxes(0, 1).reshape(-1))


def _norm_plus_one(name: str, tensor: GgufTensor, model: Any) -> RowTensor:
    return dataclasses.replace(tensor, plus=1.0) if name.endswith("norm.weight") else tensor


def _transposed(name: str, tensor: GgufTensor, model: Any) -> RowTensor:
    if ".h." not in name or len(tensor.shape) < 2:
        return tensor
    return _computed(tensor, tensor.shape[::-1], lambda values: values.T)


RULES: Mapping[Rule, Callable[[str, GgufTensor, Any], RowTensor]] = {
    "permuted_heads": _permuted_heads,
    "parts_of_qkv": _parts_of_qkv,
    "norm_plus_one": _norm_plus_one,
    "transposed": _transposed,
}


def reverted(rules: tuple[Rule, ...], name: str, tensor: GgufTensor, model: ModelConfig) -> RowTensor:
    """The tensor with the values of the family's own file, where it has this name.

    Raises:
        UserError: its shape does not fit the rule.
    """
    for rule in rules:
        try:
            changed = RULES[rule](name, tensor, model)
        except ValueError as error:
            raise UserError(f"{tensor.path}: {tensor.name} has shape {tensor.shape}, which is no {name}") from error
        if changed is not tensor:
            return changed
    return tensor


def joined_kv_b(k_b: GgufTensor, v_b: GgufTensor) -> RowTensor:
    """kv_b, (heads (nope + v), rank), of k_b, (heads, rank, nope), and v_b, (heads, v, rank).

    Raises:
        UserError: their shapes do not fit.
    """
    if len(k_b.shape) != 3 or len(v_b.shape) != 3 or (k_b.shape[0], k_b.shape[1]) != (v_b.shape[0], v_b.shape[2]):
        raise UserError(f"{k_b.path}: {k_b.name} has shape {k_b.shape}, which does not fit {v_b.shape} of {v_b.name}")
    heads, rank, nope = k_b.shape

    def join() -> np.ndarray:
        k, v = (tensor.read((slice(None),) * 3) for tensor in (k_b, v_b))
        return np.concatenate([k.swapaxes(1, 2), v], 1, dtype=np.float32).reshape(-1, rank)

    return ComputedTensor(k_b.path, k_b.name, (heads * (nope + v_b.shape[1]), rank), np.dtype(np.float32), join)


def _ordered(tensor: GgufTensor, rows: np.ndarray) -> RowTensor:
    if len(tensor.shape) > 1:
        return dataclasses.replace(tensor, order=rows)
    return _computed(tensor, tensor.shape, lambda values: values[rows])


def _computed(tensor: GgufTensor, shape: tuple[int, ...], change: Callable[[np.ndarray], np.ndarray]) -> ComputedTensor:
    return ComputedTensor(
        tensor.path,
        tensor.name,
        shape,
        tensor.dtype,
        lambda: np.ascontiguousarray(change(tensor.read((slice(None),) * len(tensor.shape)))),
    )
