"""Typed, frozen configuration. `load_config(path, overrides)` reads both spellings; see docs/config.md."""

from mesh_transformer.config.load import load_config, parse_config
from mesh_transformer.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    MeshConfig,
    MeshShape,
    ModelConfig,
    OptimizerConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "MeshConfig",
    "MeshShape",
    "ModelConfig",
    "OptimizerConfig",
    "load_config",
    "parse_config",
]
