"""Small classic checkpoints, and their contents as a plain reader of .npz sees them."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from mesh_transformer.checkpoint.classic.writer import write_classic
from mesh_transformer.checkpoint.native.manifest import flatten
from mesh_transformer.checkpoint.tensors import TensorSource, UpdateCounts
from mesh_transformer.config import ModelConfig, parse_config
from support.array_source import ArraySource
from support.builders import float32_model

# this program pads n_vocab to 128 rows, classic files do not
TINY: dict[str, Any] = {
    "layers": 2, "d_model": 16, "n_heads": 4, "n_vocab": 24, "seq": 8, "pe_rotary_dims": 4, "cores_per_replica": 1,
}  # fmt: skip


def model_config(**values: Any) -> ModelConfig:
    """The model of TINY with some values changed."""
    return parse_config({**TINY, **values}).model


class RandomSource(ArraySource):
    """Random values for every tensor of a model, with Adam's moments if `full`."""

    def __init__(self, config: ModelConfig, *, full: bool, dtype: Any = np.float32, seed: int = 0) -> None:
        import jax

        model = float32_model(config)
        shapes = flatten(jax.eval_shape(model.init, jax.random.key(0)))
        rng = np.random.default_rng(seed)
        arrays = {
            f"{group}/{name}": rng.normal(size=leaf.shape).astype(dtype)
            for group in (("params", "mu", "nu") if full else ("params",))
            for name, leaf in shapes.items()
        }
        for name, array in arrays.items():
            if name.endswith("tokens/w"):
                array[config.n_vocab :] = 0
            elif "logits" in name:
                array[..., config.n_vocab :] = 0
        super().__init__(arrays, UpdateCounts(7, 7, 6) if full else UpdateCounts(7))


def write(folder: Path, shards: int, *, full: bool = False, **values: Any) -> RandomSource:
    """Write a random classic step folder; return its source."""
    config = model_config(**values)
    source = RandomSource(config, full=full)
    write_classic(source, config, str(folder), shards)
    return source


def stored(folder: Path) -> dict[str, bytes]:
    """The bytes of each array of a step folder, with its header, by shard, file and key in the order of the file."""
    found = {}
    for path in sorted(folder.glob("shard_*/*.npz")):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                found[f"{path.parent.name}/{path.name}/{name}"] = archive.read(name)
    return found


def values(source: TensorSource) -> dict[str, np.ndarray]:
    """Every tensor, whole."""
    return {name: source.read(name, tuple(slice(None) for _ in info.shape)) for name, info in source.tensors.items()}
