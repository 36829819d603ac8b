"""Experts as transformers 5 has them in memory: the matrices of all experts of a layer in two arrays.

It writes one tensor for each expert, unless `save_pretrained` has `save_original_format=False`.
"""

import dataclasses
import re

from mesh_transformer.checkpoint.tensors import FileTensor
from mesh_transformer.errors import UserError
from mesh_transformer.families.experts import WithExperts

# gate and in, one below the other: (E, 2 F, D); and out: (E, D, F)
_FUSED = re.compile(r"(model\.layers\.\d+\.)mlp\.experts\.(gate_up_proj|down_proj)")
_OF_LAYER = re.compile(r"(model\.layers\.\d+\.)mlp\.")


def split_experts(stored: dict[str, FileTensor], model: WithExperts, where: str) -> dict[str, FileTensor]:
    """The tensors with one for each expert, under the names of the released files; `stored` without fused experts.

    Raises:
        UserError: a fused tensor has another shape.
    """
    if not any(_FUSED.fullmatch(name) for name in stored):
        return stored
    tensors: dict[str, FileTensor] = {}
    for name, tensor in stored.items():
        renamed = _OF_LAYER.sub(rf"\g<1>{model.HF_MODULE}.", name)
        fused = _FUSED.fullmatch(name)
        if fused is None:
            tensors[renamed] = tensor
            continue
        matrices = ("gate", "in") if fused[2] == "gate_up_proj" else ("out",)
        # before a loop over what a file says
        if (
            len(tensor.shape) != 3
            or tensor.shape[0] != model.n_experts
            or not tensor.n_bytes
            or tensor.shape[1] % len(matrices)
        ):
            expected = f"({model.n_experts}, rows, columns)"
            raise UserError(
                f"{where}: {name} has shape {tensor.shape}, expected {expected}: one matrix for each expert"
            )
        experts, rows, columns = tensor.shape
        shape = rows // len(matrices), columns
        module, n_bytes = renamed.removesuffix(fused[2]), shape[0] * shape[1] * tensor.dtype.itemsize
        for part in range(experts * len(matrices)):
            expert, matrix = divmod(part, len(matrices))
            key = model.HF_MATRICES[matrices[matrix]]
            start = tensor.start + part * n_bytes
            tensors[f"{module}{expert}.{key}.weight"] = dataclasses.replace(tensor, shape=shape, start=start)
    return tensors
