"""Optimizers. Each is one file in this folder and one line here."""

from mesh_transformer.optimizers import adafactor, adam, lion
from mesh_transformer.optimizers.base import OptimizerConfig

OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adam": adam.AdamConfig,
    "lion": lion.LionConfig,
    "adafactor": adafactor.AdafactorConfig,
}
