"""The model families by name: a new one is a file beside this one and a line here."""

from __future__ import annotations

from mesh_transformer.config import ModelConfig
from mesh_transformer.models import gptj
from mesh_transformer.models.base import Model

FAMILIES = {"gptj": gptj.stages}


def build(config: ModelConfig) -> Model:
    """The model of a config whose compute_dtype and remat are resolved."""
    return Model(config, FAMILIES[config.family](config))
