"""A checkpoint of any form, opened."""

from __future__ import annotations

import re

from mesh_transformer import files
from mesh_transformer.checkpoint.classic import ClassicSource
from mesh_transformer.checkpoint.forms import Form, Found, recognise
from mesh_transformer.checkpoint.hf import HFSource
from mesh_transformer.checkpoint.identity import check_model
from mesh_transformer.checkpoint.native import NativeSource
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
