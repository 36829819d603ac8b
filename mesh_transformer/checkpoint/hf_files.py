"""The tensor files of a Hugging Face folder: safetensors or .bin, whole or in shards with an index."""

from __future__ import annotations

from typing import Any

from mesh_transformer import files
from mesh_transformer.checkpoint import safetensors_file, torch_file
from mesh_transformer.checkpoint.file_tensor import FileTensor
from mesh_transformer.checkpoint.json_file import read_json
from mesh_transformer.errors import UserError

SAFETENSORS, BIN = "model.safetensors", "pytorch_model.bin"


def weight_files(folder: str) -> list[str]:
    """Which of the four spellings the folder has, in the order in which transformers looks for them."""
    spellings = (SAFETENSORS, f"{SAFETENSORS}.index.json", BIN, f"{BIN}.index.json")
    there = set(files.list_dir(folder))
    return [name for name in spellings if name in there]


def open_tensors(folder: str) -> dict[str, FileTensor]:
    """Every tensor of a folder by its Hugging Face name. Only headers are read.

    Raises:
        UserError: there are no weights, a shard is missing or damaged, or the index leads out of the folder.
    """
    found = weight_files(folder)
    if not found:
        raise UserError(f"no weights in {folder}: expected {SAFETENSORS} or {BIN}, or an index of shards")
    name = found[0]
    if not name.endswith(".index.json"):
        return _open(folder, name)
    path = files.join(folder, name)
    weight_map = _weight_map(path, ".safetensors" if name.startswith(SAFETENSORS) else ".bin")
    shards = {shard: _open(folder, shard) for shard in sorted(set(weight_map.values()))}
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise UserError(f"{path} has {tensor} in {shard}, where it is not: a shard was exchanged?")
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def _weight_map(path: str, suffix: str) -> dict[str, str]:
    weight_map: Any = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{path} has no weight_map")
    for shard in weight_map.values():
        if not isinstance(shard, str) or not shard.endswith(suffix) or {"/", "\\", "\0"} & set(shard):
            raise UserError(
                f"{path} names the shard {shard!r:.100}: expected the name of a {suffix} file right in the folder"
            )
    return weight_map


def _open(folder: str, name: str) -> dict[str, FileTensor]:
    path = files.join(folder, name)
    if name.endswith(".safetensors"):
        return safetensors_file.read_header(path)
    return torch_file.read_catalogue(path)
