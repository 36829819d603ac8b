"""A checkpoint of any form, opened."""

from __future__ import annotations

import re
from typing import Any

from mesh_transformer import files
from mesh_transformer.checkpoint import classic_folder
from mesh_transformer.checkpoint.classic import ClassicSource
from mesh_transformer.checkpoint.forms import Form, Found, recognise
from mesh_transformer.checkpoint.hf import HFSource, read_model
from mesh_transformer.checkpoint.identity import check_model, noted_model
from mesh_transformer.checkpoint.native import NativeSource, read_manifest
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig
from mesh_transformer.errors import UserError


def open_source(path: str, model: ModelConfig) -> TensorSource:
    """The checkpoint at `path` (local or `gs://`), of whatever form; see `recognise`. No tensor is read.

    Raises:
        UserError: there is none, or it is damaged or of another model.
    """
    return open_found(recognise(path), model)


def open_step(root: str, model: ModelConfig, step: int | None) -> TensorSource:
    """One step of the run in a folder, native or classic; without `step` as `open_source`.

    Raises:
        UserError: the folder has no such step; or as in `open_source`.
    """
    if step is None:
        return open_source(root, model)
    names, wanted = files.list_dir(root), f"step_{step}"
    if wanted not in names:
        steps = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d+)", name)))
        raise UserError(f"no checkpoint of step {step} in {root}: there are {steps}")
    return open_source(files.join(root, wanted), model)


def open_found(found: Found, model: ModelConfig) -> TensorSource:
    """A checkpoint that was recognised; errors as in `open_source`."""
    if found.form is Form.HUGGING_FACE:
        return HFSource(found.folder, model)
    native = found.form is Form.NATIVE
    source: TensorSource = NativeSource(found.folder) if native else ClassicSource(found.folder, model)
    check_model(source, model)
    return source


def noted_config(found: Found) -> dict[str, Any] | None:
    """What a checkpoint knows of its config, in the grouped spelling: the model, and its tokenizer if it names one. None if
    it does not know its model.

    Raises:
        UserError: what it notes cannot be read.
    """
    config: Any
    match found.form:
        case Form.HUGGING_FACE:
            config = {"model": read_model(found.folder).model_dump(mode="json")}
        case Form.NATIVE:
            config = read_manifest(found.folder).extra.get("config")
        case Form.CLASSIC:
            config = classic_folder.read_config(found.folder)
    model = noted_model(config, found.folder)
    if model is None:
        return None
    data = config.get("data")
    tokenizer = data.get("tokenizer") if isinstance(data, dict) else None
    return {
        "model": model.model_dump(mode="json"),
        "data": {"tokenizer": tokenizer} if isinstance(tokenizer, str) else None,
    }
