"""A checkpoint of any form, opened."""

from __future__ import annotations

from mesh_transformer.checkpoint.classic import ClassicSource
from mesh_transformer.checkpoint.forms import Form, Found, recognise
from mesh_transformer.checkpoint.hf import HFSource
from mesh_transformer.checkpoint.native import NativeSource
from mesh_transformer.checkpoint.tensors import TensorSource
from mesh_transformer.config import ModelConfig


def open_source(path: str, model: ModelConfig) -> TensorSource:
    """The checkpoint at `path` (local or `gs://`), of whatever form; see `recognise`. No tensor is read.

    Raises:
        UserError: there is none, or it is damaged or of another model.
    """
    return open_found(recognise(path), model)


def open_found(found: Found, model: ModelConfig) -> TensorSource:
    """A checkpoint that was recognised; errors as in `open_source`."""
    if found.form is Form.NATIVE:
        return NativeSource(found.folder)
    if found.form is Form.CLASSIC:
        return ClassicSource(found.folder, model)
    return HFSource(found.folder, model)
