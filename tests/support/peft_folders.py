"""Folders of a small random model and of adapters for it, written without torch."""

from pathlib import Path

import numpy as np

from mesh_transformer.checkpoint.hf.writer import write_hf
from mesh_transformer.checkpoint.lora_record import LoraRecord
from mesh_transformer.checkpoint.native.writer import write_native
from mesh_transformer.checkpoint.open import Checkpoint
from mesh_transformer.checkpoint.peft.writer import write_peft
from mesh_transformer.checkpoint.tensors import UpdateCounts
from mesh_transformer.config import ModelConfig, parse_config
from support import hf_folders as hf
from support.array_source import ArraySource

_SIZES = {"layers": 2, "d_model": 12, "n_heads": 3, "d_ff": 16, "n_vocab": 7, "vocab_multiple": 8, "seq": 8}
MODELS = {
    "llama": {**_SIZES, "family": "llama"},
    "mixtral": {**_SIZES, "family": "mixtral", "n_experts": 3, "experts_per_token": 2},
}


def write(folder: Path, name: str, **sizes: int) -> None:
    """Write a Hugging Face folder `base`, a folder of PEFT `peft` and a run `run`, which have the same adapters."""
    model = parse_config({"model": {**MODELS[name], **sizes}}).model
    write_hf(hf.MemorySource(hf.random_params(model)), model, str(folder / "base"))
    write_adapters(folder / "base", folder / "peft", run=folder / "run")


def write_adapters(base: Path, folder: Path, *, name: str | None = None, run: Path | None = None) -> None:
    """Write random adapters of every matrix of the model in `base` as a folder of PEFT, and as a run.

    Args:
        name: of the base in the files; None: its path.
    """
    model = Checkpoint.open(str(base)).model
    assert model is not None
    write_adapters_of(model, str(folder), name or str(base), run)


def write_adapters_of(model: ModelConfig, folder: str, base: str | None, run: Path | None = None) -> None:
    """Write random adapters of every matrix of a model as a folder of PEFT, local or gs://, and as a run."""
    config = parse_config({"model": model.model_dump(mode="json"), "lora": {"rank": 2, "alpha": 3}})
    random = np.random.default_rng(0)
    shapes = {path: array.shape for path, array in config.decoder.arrays().items() if array.adapter}
    params = {f"params/{path}": random.standard_normal(shape, np.float32) for path, shape in shapes.items()}
    (form,) = config.decoder.forms
    record = LoraRecord(base or "", "0" * 16, form.adapters)
    source = ArraySource(params, UpdateCounts(1))
    write_peft(source, record, config.model, folder, dtype=np.dtype(np.float32))
    if run is not None:
        source.extra = {"config": config.model_dump(mode="json"), "lora": record.to_json()}
        write_native(source, str(run))
