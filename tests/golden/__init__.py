"""Numbers and checkpoints of the original program, as test code reads them: README.md."""

import json
import tarfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

_BLOCK = {
    "linear/w": ("attention/q", "w"),
    "linear_1/w": ("attention/v", "w"),
    "linear_2/w": ("attention/k", "w"),
    "linear_3/w": ("attention/o", "w"),
    "linear_4/w": ("ff/in", "w"),
    "linear_4/b": ("ff/in", "b"),
    "linear_5/w": ("ff/out", "w"),
    "linear_5/b": ("ff_out", "b"),
    "replicated_layer_norm/scale": ("norm", "scale"),
    "replicated_layer_norm/offset": ("norm", "offset"),
    "rms_norm/scale": ("norm", "scale"),
    "rms_norm/offset": ("norm", "offset"),
}
_OTHER = {
    "embedding_shard/~/linear/w": ("embed", "tokens", "w"),
    "embedding_shard/~/linear/b": ("embed", "tokens", "b"),
    "embedding_shard/pos_embs": ("embed", "positions", "w"),
    "relative_position_embs/rel_embedding": ("embed", "relative", "w"),
    "projection_shard/~/linear/w": ("head", "logits", "w"),
    "projection_shard/~/linear/b": ("head", "logits", "b"),
    "projection_shard/~/replicated_layer_norm/scale": ("head", "norm", "scale"),
    "projection_shard/~/replicated_layer_norm/offset": ("head", "norm", "offset"),
    "projection_shard/~/rms_norm/scale": ("head", "norm", "scale"),
    "projection_shard/~/rms_norm/offset": ("head", "norm", "offset"),
}
_COLUMNS = ("linear/w", "linear_1/w", "linear_2/w", "linear_4/w", "linear_4/b", "projection_shard/~/linear/w",
            "projection_shard/~/linear/b", "pos_embs")  # fmt: skip
_ROWS = ("linear_3/w", "linear_5/w", "embedding_shard/~/linear/w", "rel_embedding")
_SUMMED = ("embedding_shard/~/linear/b", "linear_5/b")


def unpack(name: str, folder: Path) -> Path:
    """Unpack `name`.tar.xz, one of the archives beside this file, into a folder; returns the folder."""
    with tarfile.open(Path(__file__).with_name(f"{name}.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def config(path: Path) -> dict[str, Any]:
    """A classic config, as a dictionary."""
    return json.loads(path.read_text())


def checkpoint_names(layers: int, norm: str, pe: str) -> list[str]:
    """Parameter names in the order of the original's leaves."""
    norm_module = "replicated_layer_norm" if norm.startswith("layernorm") else "rms_norm"
    fields = ["offset", "scale"] if norm.startswith("layernorm") or norm.endswith("-bias") else ["scale"]
    norms = [f"{norm_module}/{field}" for field in fields]
    names = ["embedding_shard/pos_embs"] if pe == "fixed" else []
    names += ["embedding_shard/~/linear/b", "embedding_shard/~/linear/w"]
    for layer in sorted(str(i) for i in range(layers)):
        parts = [
            "linear/w",
            "linear_1/w",
            "linear_2/w",
            "linear_3/w",
            "linear_4/b",
            "linear_4/w",
            "linear_5/b",
        ]
        names += [f"layer_{layer}/~/{part}" for part in [*parts, "linear_5/w", *norms]]
    names += ["projection_shard/~/linear/b", "projection_shard/~/linear/w"]
    names += [f"projection_shard/~/{norm}" for norm in norms]
    return names + (["relative_position_embs/rel_embedding"] if pe == "t5" else [])


def read_checkpoint(step_dir: Path, names: list[str]) -> dict[str, np.ndarray]:
    """The float32 parameters of a classic step folder, merged over its shards, by original name."""
    shards = []
    for shard in sorted(step_dir.glob("shard_*"), key=lambda path: int(path.name.removeprefix("shard_"))):
        files = [np.load(shard / f"{i}.npz", allow_pickle=False) for i in range(16)]
        leaves = [_leaf(file[f"arr_{i}"]) for file in files for i in range(len(file.files))]
        first = len(leaves) - 1 - len(names)  # parameters and the step come last
        shards.append(dict(zip(names, leaves[first:-1], strict=True)))
    return {name: merge(name, np.stack([shard[name] for shard in shards])) for name in names}


def _leaf(array: np.ndarray) -> np.ndarray:
    """An array as it is, but bfloat16, which numpy reads as two bytes without a type, as float32."""
    return array.view(ml_dtypes.bfloat16).astype(np.float32) if array.dtype == np.dtype("V2") else array


def merge(name: str, shards: np.ndarray) -> np.ndarray:
    """The whole of a parameter given (shards, ...)."""
    if name.endswith(_SUMMED):
        return shards.sum(0, dtype=np.float64).astype(shards.dtype)
    if name.endswith(_ROWS):
        return np.concatenate(list(shards), axis=0)
    if name.endswith(_COLUMNS):
        return np.concatenate(list(shards), axis=-1)
    if "rms_norm" in name:
        return shards.mean(0)
    return shards[0]


def to_params(arrays: dict[str, np.ndarray], padded_vocab: int) -> dict[str, Any]:
    """Our parameter tree from whole arrays by original name; vocabulary rows are padded with zeros."""
    params: dict[str, Any] = {"embed": {}, "blocks": {}, "head": {}}
    layers = 1 + max(int(name.split("/")[0].removeprefix("layer_")) for name in arrays if name.startswith("layer_"))
    for name, (stage, module, field) in _OTHER.items():
        if name in arrays:
            array = arrays[name]
            vocab_axis = {"tokens/w": 0, "logits/w": 1, "logits/b": 0}.get(f"{module}/{field}")
            if vocab_axis is not None:
                padding = [(0, 0)] * array.ndim
                padding[vocab_axis] = (0, padded_vocab - array.shape[vocab_axis])
                array = np.pad(array, padding)
            params[stage].setdefault(module, {})[field] = array
    for name, (module, field) in _BLOCK.items():
        if f"layer_0/~/{name}" in arrays:
            stacked = np.stack([arrays[f"layer_{i}/~/{name}"] for i in range(layers)])
            params["blocks"].setdefault(module, {})[field] = stacked
    return params


def read_params(step_dir: Path, model: Any) -> dict[str, Any]:
    """Our parameter tree from a classic step folder, for a ModelConfig."""
    names = checkpoint_names(model.layers, model.norm, model.pe)
    return to_params(read_checkpoint(step_dir, names), model.decoder().padded_vocab)


def read_npz_params(path: Path, model: Any) -> dict[str, Any]:
    """Our parameter tree from an npz of parameters with a leading shard dimension."""
    file = np.load(path, allow_pickle=False)
    return to_params({name: merge(name, file[name]) for name in file.files}, model.decoder().padded_vocab)


def read_variant(folder: Path, model: Any) -> dict[str, Any]:
    """Our parameter tree of one of the variants."""
    if (folder / "params.npz").exists():
        return read_npz_params(folder / "params.npz", model)
    return read_params(folder / "ckpt_params/step_0", model)
