"""Typed, frozen configuration. `load_config(path, overrides)` reads both spellings; see docs/config.md."""

from mesh_transformer.config.cluster import ClusterConfig
from mesh_transformer.config.compute import ComputeConfig
from mesh_transformer.config.load import load_config, parse_config
from mesh_transformer.config.mesh import AXES, MeshConfig, MeshShape, mesh_shape
from mesh_transformer.config.overrides import is_set
from mesh_transformer.config.run import CheckpointConfig, DataConfig, LoggingConfig
from mesh_transformer.config.schema import Config
from mesh_transformer.families.base import ModelConfig
from mesh_transformer.optimizers import OptimizerConfig

__all__ = [
    "AXES",
    "CheckpointConfig",
    "ClusterConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "LoggingConfig",
    "MeshConfig",
    "MeshShape",
    "ModelConfig",
    "OptimizerConfig",
    "is_set",
    "load_config",
    "mesh_shape",
    "parse_config",
]
