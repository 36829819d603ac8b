"""Typed, frozen configuration. `load_config(path, overrides)` reads both spellings; see docs/config.md."""

# other packages import these names from `config`
# ruff: noqa: F401
from mesh_transformer.config.load import is_set, load_config, parse_config
from mesh_transformer.config.lora import LoraConfig
from mesh_transformer.config.mesh import AXES, MeshConfig, MeshShape, mesh_shape
from mesh_transformer.config.schema import (
    CheckpointConfig,
    ClusterConfig,
    ComputeConfig,
    Config,
    DataConfig,
    ExpertsConfig,
    LoggingConfig,
)
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.optimizers import OptimizerConfig
