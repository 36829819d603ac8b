"""The training step: optimizer, gradients, statistics. Pure. docs/library.md describes the names here."""

from mesh_transformer.models.stack import Kind
from mesh_transformer.spec import LayerGroup
from mesh_transformer.train.optimizer import Optimizer
from mesh_transformer.train.own import gradients, jit, loss
from mesh_transformer.train.schedule import ModelFunctions

__all__ = ["Kind", "Optimizer", "ModelFunctions", "LayerGroup", "gradients", "jit", "loss"]
