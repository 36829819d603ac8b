"""The pairs of matrices in an adapter_model.safetensors, by the modules of transformers that they adapt.

The routed experts of a layer are in one of three forms: one pair for the two input matrices of all experts and one for
the output matrices, whose rank may be doubled (PEFT 0.21 on transformers 5), or one pair for each matrix of each expert
(transformers 4).
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from mesh_transformer import files, hub
from mesh_transformer.checkpoint.hf.safetensors_file import read_header
from mesh_transformer.checkpoint.tensors import FileTensor
from mesh_transformer.errors import UserError

ADAPTER_TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])\.weight")
_REASONS = {
    "lora_magnitude_vector": "DoRA has a magnitude beside each pair",
    "lora_embedding": "only matrices of the layers can have adapters, not tables",
    "embed_tokens": "only matrices of the layers can have adapters, not tables",
    "lm_head": "only matrices of the layers can have adapters, not the head",
    ".lora_B.bias": "b has a bias",
}


class Pair(NamedTuple):
    """a (rank, inputs) and b (outputs, rank) of the matrix of a module; of all experts of a layer, (experts * rank,
    inputs) and (outputs, rank * experts)."""

    module: str
    a: FileTensor
    b: FileTensor

    @property
    def rank(self) -> int:
        """Of the pair of one matrix."""
        return self.a.shape[0]

    def check(self, inputs: int, outputs: int, experts: int = 1) -> None:
        """Check that it is of a matrix with so many inputs and outputs.

        Raises:
            UserError: it is not, or its rank is over both.
        """
        ranks = self.a.shape[0]
        rank, rest = divmod(ranks, experts)
        if (
            self.a.shape != (ranks, inputs)
            or self.b.shape != (outputs, ranks)
            or rest
            or not 0 < rank <= max(inputs, outputs)
        ):
            expected = "(rank, {}) and ({}, rank)" if experts == 1 else "(experts x rank, {}) and ({}, rank x experts)"
            raise UserError(
                f"{self.a.path}: the pair of {self.module:.200} has the shapes {self.a.shape} and {self.b.shape}, "
                f"expected {expected.format(inputs, outputs)}: it is of another model"
            )


def read_pairs(folder: str) -> dict[str, Pair]:
    """The pairs in a folder, local or `gs://`, by module. Reads only the header.

    Raises:
        UserError: there is no safetensors file, or it has other tensors than pairs.
    """
    names = files.list_dir(folder)
    path = files.join(folder, ADAPTER_TENSORS)
    if ADAPTER_TENSORS not in names:
        raise UserError(
            f"{folder} has {hub.ADAPTER_CONFIG} and no {ADAPTER_TENSORS}: adapter_model.bin, which is pickled, is not "
            "read; load it with PEFT and save it again with save_pretrained"
        )
    factors: dict[str, dict[str, FileTensor]] = {}
    for name, tensor in read_header(path).items():
        match = _FACTOR.fullmatch(name)
        reason = next((reason for part, reason in _REASONS.items() if part in name), None)
        if match is None or reason is not None:
            raise UserError(
                f"{path}: {name:.200} is no a or b of a matrix of the layers"
                + (f": {reason}" if reason else f", such as {PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight")
            )
        if len(tensor.shape) != 2 or tensor.dtype.kind in "biu":
            raise UserError(f"{path}: {name:.200} is {tensor.dtype} {tensor.shape}: expected a matrix of floats")
        factors.setdefault(match["module"], {})[match["factor"]] = tensor
    if not factors:
        raise UserError(f"{path} has no tensors")
    return {module: _pair(path, module, both) for module, both in factors.items()}


def _pair(path: str, module: str, factors: Mapping[str, FileTensor]) -> Pair:
    for name, other in (("A", "B"), ("B", "A")):
        if name not in factors:
            raise UserError(f"{path}: {module:.200} has lora_{other} and no lora_{name}")
    return Pair(module, factors["A"], factors["B"])
